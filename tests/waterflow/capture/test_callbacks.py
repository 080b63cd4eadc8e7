"""What callbacks and data reach: whether batches may be fetched ahead, who looks at gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.models import Mlp
from waterflow.account.account import Account
from waterflow.capture.callbacks import looks_at_gradients, may_fetch_ahead

pytestmark = pytest.mark.cpu


def job_of(data=None, on_step=None, scheduler=None):
    net = Mlp()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    made = wf.Job(
        "a",
        model=net,
        optimizer=optimizer,
        loss=cross_entropy,
        data=[rows(8)] if data is None else data,
        epochs=1,
    )
    if data is not None and callable(data):
        made.data = data(made)
    if on_step is not None:
        made.on_step = on_step(made)
    if scheduler is not None:
        made.scheduler = scheduler(made)
    return made


class Own(Dataset):
    """A data set that holds something."""

    def __init__(self, held=None):
        self.held = held

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(4), index


def batches(of):
    return [of(x) for x in rows(8)]


def quiet(_):
    return lambda result: None


def collate(samples):
    return torch.stack([x for x, _ in samples])


def fill(batch, result):
    batch["x"] = torch.zeros(2)


def filled_by_hook(job, data):
    job.optimizer.register_step_post_hook(lambda *_: data.append(rows(8)))
    return data


#: Data, callback, and whether batches may be fetched ahead.
AHEAD = {
    "list": (None, None, True),
    "list, callback": (None, quiet, True),
    "tuple": (lambda job: (rows(8),), quiet, True),
    "loader": (lambda job: DataLoader(TensorDataset(*rows(8)), 4), None, True),
    "loader, shuffled": (lambda job: DataLoader(Own(), 4, shuffle=True), None, True),
    "loader, callback": (lambda job: DataLoader(Own(), 4), quiet, False),
    "loader of the model": (lambda job: DataLoader(Own(job.model), 4), None, False),
    "loader of a weight": (lambda job: DataLoader(Own([job.model.one.weight]), 4), None, False),
    "loader of the optimizer": (lambda job: DataLoader(Own(job.optimizer), 4), None, False),
    "loader, own collate": (lambda job: DataLoader(Own(), 4, collate_fn=collate), None, False),
    "loader without batches": (lambda job: DataLoader(Own(), batch_size=None), None, False),
    "generator": (lambda job: iter([rows(8)]), None, False),
    "list that the callback fills": (
        lambda job: [rows(8)],
        lambda job: lambda result: job.data.append(rows(8)),
        False,
    ),
    "list of lists that the callback fills": (
        lambda job: [[*rows(8)]],
        lambda job: lambda result: job.data[0].reverse(),
        False,
    ),
    "list of dictionaries that the callback fills": (
        lambda job: [{"x": torch.ones(2)}],
        lambda job: functools.partial(fill, job.data[0]),
        False,
    ),
    "list of tensors that the callback resizes": (
        lambda job: [(torch.ones(2), 1)],
        lambda job: lambda result, tensor=job.data[0][0][:1]: tensor.resize_(1),
        False,
    ),
    "list of a part of a weight": (
        lambda job: [(job.model.one.weight.detach()[1:], 0)],
        None,
        False,
    ),
    "list of sparse tensors": (lambda job: [(torch.eye(2).to_sparse(), 0)], None, True),
    "list of dictionaries": (lambda job: [{"x": torch.ones(2), "id": "a"}], None, True),
    "list that a hook of the optimizer may fill": (
        lambda job: filled_by_hook(job, [rows(8)]),
        None,
        False,
    ),
    "list of a weight": (lambda job: [(job.model.one.weight, 0)], None, False),
    "list of a subclass": (lambda job: type("Mine", (list,), {})([rows(8)]), None, False),
}


@pytest.mark.parametrize("name", AHEAD)
def test_what_may_be_fetched_ahead(name):
    data, on_step, expected = AHEAD[name]
    job = job_of(on_step=on_step)
    if data is not None:
        job.data = data(job)
    if "that the callback" in name:
        job.on_step = on_step(job)
    assert may_fetch_ahead(job, job.model.parameters()) is expected


class Count:
    made = 0


class Counting(Own):
    """A data set that counts for everybody."""

    def __getitem__(self, index):
        Count.made += 1
        return super().__getitem__(index)


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(7, -1, -1))

    def __len__(self):
        return 8


def weighted(model, batch):
    return cross_entropy(model, batch) * Count.made


#: Data, the job's loss, and whether batches may be fetched ahead of steps that read what it reads.
BESIDE_READERS = {
    "what the loss does not read": (lambda: DataLoader(Counting(), 4), cross_entropy, True),
    "what the loss reads": (lambda: DataLoader(Counting(), 4), weighted, False),
    "nothing": (lambda: DataLoader(Own(), 4), weighted, True),
    "an order": (lambda: DataLoader(Own(), 4, sampler=Backwards()), weighted, True),
    "tensors": (lambda: DataLoader(TensorDataset(*rows(8)), 4, shuffle=True), weighted, True),
}


@pytest.mark.parametrize("name", BESIDE_READERS)
def test_data_that_may_change_what_steps_read_come_in_turn(name):
    data, loss, expected = BESIDE_READERS[name]
    job = job_of(data())
    read = Account.take({"model": job.model, "loss": loss})
    assert may_fetch_ahead(job, job.model.parameters(), [read]) is expected


def norm_of(model):
    return sum(parameter.grad.norm() for parameter in model.parameters())


def clearing(job):
    def on_step(result):
        job.optimizer.zero_grad()
        with torch.no_grad():
            job.model.one.weight.requires_grad_(True)

    return on_step


def second(job):
    other = optim.SGD(job.model.parameters(), lr=0.1)
    return lambda result: other.step()


class Trainer:
    def __init__(self, job):
        self.job = job

    def __call__(self, result):
        return self.helper(result)

    def helper(self, result):
        return self.job.model.one.weight.grad


def asserting(job):
    def on_step(result):
        assert result.loss == result.loss, "pytest puts names of its own into this"

    return on_step


class Watcher(torch.nn.Linear):
    def largest(self):
        return self.weight.grad.abs().max()


def by_a_method_of_the_model(job):
    job.model.watcher = Watcher(1, 1)
    return lambda result: job.model.watcher.largest()


class Storage:
    """Names words that hold "grad", as databases do."""

    def upgrade(self):
        self.downgraded, self.gradual = self.degrade(), None

    def degrade(self):
        return self.upgrade


def with_a_storage(job):
    storage = Storage()
    return lambda result: storage.upgrade()


def by_a_name_of_two_words(job):
    job.model.upgraded_gradients = lambda: [p.grad for p in job.model.parameters()]
    return lambda result: job.model.upgraded_gradients()


#: Callback, and whether it looks at gradients.
LOOKS = {
    "none": (None, False),
    "quiet": (quiet, False),
    "loss": (lambda job: lambda result: print(result.loss), False),
    "grad": (lambda job: lambda result: job.model.one.weight.grad, True),
    "by a function": (lambda job: lambda result: norm_of(job.model), True),
    "by a method": (Trainer, True),
    "getattr": (lambda job: lambda result: getattr(job.model.one.weight, "grad"), True),  # noqa: B009
    "clip": (
        lambda job: lambda result: torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0),
        True,
    ),
    "clears them": (clearing, False),
    "no_grad": (lambda job: torch.no_grad()(lambda result: None), False),
    "own optimizer": (lambda job: lambda result: job.optimizer.state_dict(), False),
    "second optimizer": (second, True),
    "by a method of the model": (by_a_method_of_the_model, True),
    "evaluates": (lambda job: lambda result: job.model.eval().train(), False),
    "asserts": (asserting, False),
    "other words": (with_a_storage, False),
    "two words": (by_a_name_of_two_words, True),
    "copies": (lambda job: lambda result: copy.deepcopy(job.model), False),
    "copies and looks": (lambda job: lambda result: norm_of(copy.deepcopy(job.model)), True),
}


@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_at_gradients(name):
    on_step, expected = LOOKS[name]
    assert looks_at_gradients(job_of(on_step=on_step)) is expected


def test_methods_that_others_give_all_modules_are_not_called_by_copies(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "of_a_library", norm_of, raising=False)
    assert not looks_at_gradients(job_of(on_step=LOOKS["copies"][0]))
    called = job_of(on_step=lambda job: lambda result: job.model.of_a_library())
    assert looks_at_gradients(called)


def test_a_callback_that_reaches_too_much_may_look_at_gradients():
    many = [Trainer(None) for _ in range(30_000)]
    assert looks_at_gradients(job_of(on_step=lambda job: lambda result: len(many)))


def reporting(study):
    """A callback that reports to a trial of a study, and has it pruned."""

    def made(job):
        trial = study.ask()

        def on_step(result):
            trial.report(result.loss, result.step)
            return wf.STOP if trial.should_prune() else None

        return on_step

    return made


def test_a_callback_may_report_to_a_long_study():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    curves = {"curves": [[float(index)] for index in range(200)]}
    for _ in range(150):  # 30,000 lists
        study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=curves))
    assert not looks_at_gradients(job_of(on_step=reporting(study)))


def test_what_a_user_has_given_a_study_may_look_at_gradients():
    optuna = pytest.importorskip("optuna")

    class ByGradient(optuna.pruners.BasePruner):
        def __init__(self, model):
            self.model = model

        def prune(self, study, trial):
            return norm_of(self.model) > 1

    class ByStep(optuna.pruners.BasePruner):
        def __init__(self, model):
            self.models = [model]

        def prune(self, study, trial):
            return trial.last_step > 3

    def with_a_pruner(kind):
        return lambda job: reporting(optuna.create_study(pruner=kind(job.model)))(job)

    assert looks_at_gradients(job_of(on_step=with_a_pruner(ByGradient)))
    assert not looks_at_gradients(job_of(on_step=with_a_pruner(ByStep)))


def test_a_subclass_of_a_librarys_class_is_the_users_code():
    tqdm = pytest.importorskip("tqdm")

    class Bar(tqdm.tqdm):
        def display(self, *args):  # which the library calls
            return norm_of(self.net)

    bar, plain = Bar(disable=True), tqdm.tqdm(disable=True)
    assert looks_at_gradients(job_of(on_step=lambda job: lambda result: bar.update()))
    assert not looks_at_gradients(job_of(on_step=lambda job: lambda result: plain.update()))


def test_torchs_schedulers_do_not_look_at_gradients():
    for kind in (
        lambda o: lr_scheduler.StepLR(o, 1),
        lr_scheduler.ReduceLROnPlateau,
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    ):
        assert not looks_at_gradients(job_of(scheduler=lambda job, k=kind: k(job.optimizer)))


def test_an_optimizer_of_the_users_behind_a_scheduler_does_not_count():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= group["lr"] * parameter.grad

    model = torch.nn.Linear(2, 2)
    optimizer = Own(model.parameters(), lr=0.1)

    def step(model, batch, optimizer):
        optimizer.step()

    job = wf.Job(
        "a",
        model=model,
        optimizer=optimizer,
        step=step,
        data=[torch.ones(1)],
        scheduler=lr_scheduler.StepLR(optimizer, 1),
    )
    assert not looks_at_gradients(job)


def test_a_scheduler_of_the_users_may():
    class Own:
        def __init__(self, model):
            self.model = model

        def step(self):
            return self.model.one.weight.grad

    assert looks_at_gradients(job_of(scheduler=lambda job: Own(job.model)))
