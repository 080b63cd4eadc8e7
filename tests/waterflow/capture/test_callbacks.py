"""What callbacks and data reach: whether batches may be fetched ahead, who looks at gradients."""

from __future__ import annotations

import copy
import functools
import operator

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.models import Mlp
from waterflow.account.account import Account
from waterflow.capture.callbacks import (
    callbacks_use_gradients,
    data_use_gradients,
    may_fetch_ahead,
)

pytestmark = pytest.mark.cpu


def looks_at_gradients(job):
    return callbacks_use_gradients(job) or data_use_gradients(job)


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


class Scaled(Own):
    """A data set that reads the memory of an array."""

    def __getitem__(self, index):
        return torch.zeros(4), float(self.held[0])


def over_an_array(job):
    """The memory of a weight, which is then a part of the array."""
    flat = np.zeros(job.model.one.weight.numel() + 8, dtype=np.float32)
    part = torch.from_numpy(flat[8:]).view_as(job.model.one.weight)
    job.model.one.weight = torch.nn.Parameter(part)
    return flat


#: Data over memory, and whether they may be fetched ahead of steps that write to the model.
OVER_MEMORY = {
    "a view": (lambda job: Scaled(job.model.one.weight.detach().numpy()[1:3]), False),
    "a transposed view": (lambda job: Scaled(job.model.one.weight.detach().numpy().T), False),
    "a buffer": (lambda job: Scaled(memoryview(job.model.one.bias.detach().numpy())), False),
    "the array": (lambda job: Scaled(over_an_array(job)), False),
    "another part of the array": (lambda job: Scaled(over_an_array(job)[:8]), True),
    "another tensor": (lambda job: Scaled(torch.from_numpy(over_an_array(job))), False),
    "rows": (lambda job: TensorDataset(torch.from_numpy(over_an_array(job))), False),
    "a copy": (lambda job: Scaled(job.model.one.weight.detach().numpy().copy()), True),
}


@pytest.mark.parametrize("name", OVER_MEMORY)
def test_memory_that_data_share_with_the_model(name):
    data, expected = OVER_MEMORY[name]
    job = job_of()
    job.data = DataLoader(data(job), 4)
    assert may_fetch_ahead(job, list(job.model.parameters())) is expected


def test_a_list_of_memory_that_the_model_has():
    job = job_of()
    flat = over_an_array(job)
    for on_step in (None, quiet(job)):
        job.on_step = on_step
        for held, expected in ((flat[8:], False), (flat[:8], True), (flat.copy(), True)):
            job.data = [(torch.from_numpy(held), 0)]
            assert may_fetch_ahead(job, list(job.model.parameters())) is expected


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


def by_a_tuple(job):
    def on_step(result):
        for name in ("data", "grad"):
            for parameter in job.model.parameters():
                getattr(parameter, name)

    return on_step


def by_a_default(job):
    return lambda result, name="grad": getattr(job.model.one.weight, name)


def by_a_closure(job):
    name = "grad"
    return lambda result: getattr(job.model.one.weight, name)


NAMES = ("data", "grad")


def by_an_attribute_of_an_object(job):
    class Reader:
        def __init__(self):
            self.name = "grad"

        def __call__(self, result):
            return getattr(job.model.one.weight, self.name)

    return Reader()


def by_an_attribute_of_a_class(job):
    class Reader:
        name = "_grad"

        def __call__(self, result):
            return getattr(job.model.one.weight, self.name)

    return Reader()


#: Callback that has the texts of gradients, and whether it looks at them.
BY_TEXTS = {
    "tuple": (by_a_tuple, True),
    "default": (by_a_default, True),
    "closure": (by_a_closure, True),
    "global": (
        lambda job: lambda result: [getattr(job.model.one.weight, name) for name in NAMES],
        True,
    ),
    "attribute": (by_an_attribute_of_an_object, True),
    "attribute of the class": (by_an_attribute_of_a_class, True),
    "reader": (
        lambda job: lambda result, read=operator.attrgetter("one.weight.grad"): read(job.model),
        True,
    ),
    "other texts": (
        lambda job: lambda result, name="data": getattr(job.model.one.weight, name),
        False,
    ),
    "a log": (lambda job: lambda result, log={"grad": 0}: log.update(loss=result.loss), False),
}


@pytest.mark.parametrize("name", BY_TEXTS)
def test_who_looks_at_gradients_by_a_text(name):
    on_step, expected = BY_TEXTS[name]
    assert looks_at_gradients(job_of(on_step=on_step)) is expected


class Loop:
    """Has it all, as trainers do."""

    def __init__(self, job):
        self.model, self.opt, self.losses = job.model, job.optimizer, []
        self.schedule = lr_scheduler.StepLR(self.opt, 3)

    def follow(self, result):
        self.schedule.step()
        self.opt.param_groups[0]["weight_decay"] = 0.01 * result.step
        self.losses.append((result.step, result.loss))

    def take_it_twice(self, result):
        self.opt.step()

    def take_it_by_the_schedule(self, result):
        self.schedule.optimizer.step()


class Maker(Loop):
    """Has made its optimizer itself."""

    def __init__(self, job):
        super().__init__(job)
        self.opt = job.optimizer = made_for(job.model)


def made_for(model):
    return optim.SGD(model.parameters(), lr=0.1)


def making_a_maker(job):
    class Anew(Loop):
        def __init__(self, job):
            super().__init__(job)
            made_for(job.model)

    return lambda result: Anew(job)


KIND = optim.SGD


def backward_and_step(job):
    def on_step(result):
        cross_entropy(job.model, job.data[0]).backward()
        optimizer.step()

    optimizer = job.optimizer
    return on_step


def step_of_another_name(job):
    def on_step(result):
        again = optimizer.step
        again()

    optimizer = job.optimizer
    return on_step


def each_of_them(job):
    def on_step(result):
        for one in (optimizer,):
            one.step()

    optimizer = job.optimizer
    return on_step


def setting_rates(job):
    optimizer = job.optimizer

    def on_step(result):
        step = result.step
        optimizer.param_groups[0]["lr"] = 0.1 / max(step, result.step)

    return on_step


def stepping_a_scheduler(job):
    scheduler = lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    return lambda result: scheduler.step()


def averaging(job):
    average = copy.deepcopy(job.model).requires_grad_(False)

    @torch.no_grad()
    def on_step(result):
        for mean, parameter in zip(average.parameters(), job.model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)

    return on_step


def stopping(job):
    best = [float("inf"), 0]

    def on_step(result):
        if result.loss < best[0]:
            best[:] = [result.loss, result.step]
        return wf.STOP if result.step - best[1] > 4 else None

    return on_step


def profiled(job):
    profiler, optimizer = torch.profiler.profile(), job.optimizer
    return lambda result: (profiler.step(), optimizer.param_groups)


def scaled(job):
    scaler, optimizer = torch.amp.GradScaler("cpu"), job.optimizer
    return lambda result: scaler.step(optimizer)


#: Callback, and whether it steps an optimizer.
STEPS = {
    "the job's": (lambda job: lambda result: job.optimizer.step(), True),
    "after a backward": (backward_and_step, True),
    "with arguments": (lambda job: lambda result: job.optimizer.step(*[]), True),
    "a parameter": (lambda job: lambda result, o=job.optimizer: o.step(), True),
    "bound": (lambda job: lambda result, again=job.optimizer.step: again(), True),
    "of another name": (step_of_another_name, True),
    "by a text": (lambda job: lambda result: getattr(job.optimizer, "step")(), True),  # noqa: B009
    "by a caller": (
        lambda job: lambda result, call=operator.methodcaller("step"): call(job.optimizer),
        True,
    ),
    "in a loop": (each_of_them, True),
    "an attribute's": (lambda job: Loop(job).take_it_twice, True),
    "a scheduler's": (lambda job: Loop(job).take_it_by_the_schedule, True),
    "a copy's": (lambda job: lambda result: copy.deepcopy(job.optimizer).step(), True),
    "a new one's": (lambda job: lambda result: optim.SGD(job.model.parameters()).step(), True),
    "one of another name": (lambda job: lambda result: KIND(job.model.parameters()).step(), True),
    "by a scaler": (scaled, True),
    "one that an object makes": (making_a_maker, True),
    "rates alone": (setting_rates, False),
    "a scheduler": (stepping_a_scheduler, False),
    "a trainer's scheduler": (lambda job: Loop(job).follow, False),
    "a trainer that made its optimizer": (lambda job: Maker(job).follow, False),
    "averages": (averaging, False),
    "early stopping": (stopping, False),
    "a profiler": (profiled, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_who_steps_an_optimizer(name):
    on_step, expected = STEPS[name]
    assert looks_at_gradients(job_of(on_step=on_step)) is expected


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


class Decaying(lr_scheduler.LRScheduler):
    """A scheduler of the user's own that looks at no gradient."""

    def get_lr(self):
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]

    def step(self, epoch=None):
        super().step(epoch)


class ByNorm(Decaying):
    def get_lr(self):
        group = self.optimizer.param_groups[0]
        return [0.1 if group["params"][0].grad is None else 0.01]


class Again(Decaying):
    def step(self, epoch=None):
        super().step(epoch)
        self.optimizer.step()


def rate(epoch):
    return 0.9**epoch


def rate_by_norm(job):
    return lambda epoch: 1.0 if job.model.one.weight.grad is None else 0.5


#: A scheduler derived from torch's or with code of the user's, and whether that looks at gradients.
SCHEDULERS = {
    "lambda": (lambda job: lr_scheduler.LambdaLR(job.optimizer, rate), False),
    "own": (lambda job: Decaying(job.optimizer), False),
    "lambda that looks": (
        lambda job: lr_scheduler.LambdaLR(job.optimizer, rate_by_norm(job)),
        True,
    ),
    "one of several": (
        lambda job: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.StepLR(job.optimizer, 1),
                lr_scheduler.MultiplicativeLR(job.optimizer, rate_by_norm(job)),
            ]
        ),
        True,
    ),
    "own that looks": (lambda job: ByNorm(job.optimizer), True),
    "own that steps": (lambda job: Again(job.optimizer), True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_users_code_in_a_scheduler_of_torchs(name):
    scheduler, expected = SCHEDULERS[name]
    assert looks_at_gradients(job_of(scheduler=scheduler)) is expected


class Weighing(Own):
    """A data set that looks at what it holds."""

    def __getitem__(self, index):
        gradient = self.held.one.weight.grad
        return torch.zeros(4), 0 if gradient is None else 1


class InOrderOfNorms(Sampler):
    def __init__(self, model):
        self.model = model

    def __iter__(self):
        return iter(range(8) if self.model.one.weight.grad is None else range(7, -1, -1))

    def __len__(self):
        return 8


class Rows:
    """Data that act before each batch."""

    def __init__(self, act):
        self.act = act

    def __iter__(self):
        for row in [rows(8)]:
            self.act()
            yield row


def generated(job):
    for row in [rows(8)]:
        yield row if job.model.one.weight.grad is None else None


def edges(image):
    return np.gradient(image)


class Edges(Own):
    """A data set about other gradients."""

    def __getitem__(self, index):
        return torch.from_numpy(edges(np.zeros(4))), 0


#: Data, and whether they look at gradients or step an optimizer.
DATA = {
    "a list": (lambda job: [rows(8)], False),
    "tensors": (lambda job: DataLoader(TensorDataset(*rows(8)), 4, shuffle=True), False),
    "a data set": (lambda job: DataLoader(Own(job.model), 4), False),
    "a data set that looks": (lambda job: DataLoader(Weighing(job.model), 4), True),
    "an order": (lambda job: DataLoader(Own(), 4, sampler=InOrderOfNorms(job.model)), True),
    "a collation": (
        lambda job: DataLoader(Own(), 4, collate_fn=lambda samples: norm_of(job.model)),
        True,
    ),
    "an iterable": (lambda job: Rows(lambda: norm_of(job.model)), True),
    "one that steps": (lambda job: Rows(lambda: job.optimizer.step()), True),
    "one that sets rates": (lambda job: Rows(lambda: job.optimizer.param_groups), False),
    "a generator": (generated, True),
    "another generator": (lambda job: (row for row in [rows(8)]), False),
    "other gradients": (lambda job: DataLoader(Edges(), 4), False),
    "much": (lambda job: DataLoader(Weighing([Own() for _ in range(30_000)]), 4), False),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_look_at_gradients(name):
    data, expected = DATA[name]
    job = job_of()
    job.data = data(job)
    assert looks_at_gradients(job) is expected


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
