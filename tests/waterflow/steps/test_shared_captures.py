"""Captures that jobs share: which jobs may, which may not, and equal numbers for all of them."""

import collections
import contextlib
import decimal
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import waterflow as wf
from tests.support.steps import steps_of
from tests.support.trial_ways import (
    ALIKE,
    OTHERS,
    by_name,
    made_function,
    momentum,
    rows,
    trial,
    with_parts,
)
from waterflow.job.batch import flatten
from waterflow.steps import shared_captures, step_builder
from waterflow.steps.shared_captures import SharedCaptures

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def reference(name, change):
    """The job after the plain loop."""
    job = trial(name, change)
    report = wf.run_eager(job, threads=1)
    return report.losses, [tensor.clone() for tensor in tensors_of(job)]


def tensors_of(job):
    state = job.optimizer.state
    made = [value for entries in state.values() for value in entries.values()]
    return [*job.model.parameters(), *job.model.buffers(), *filter(torch.is_tensor, made)]


@pytest.fixture(scope="module")
def trained():
    """All trials of both tables beside each other, after one that all of them might have shared."""
    changes = {**ALIKE, **OTHERS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jobs = {name: trial(name, change) for name, change in changes.items()}
    with wf.Engine(memory="256MB", lanes=2, threads=1) as engine:
        engine.submit(trial("the first")).result()
        for job in jobs.values():
            engine.submit(job)
    torch.set_num_threads(threads)
    return jobs, engine.report()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS, *ALIKE])
def test_a_trial_has_the_numbers_of_the_loop_and_shares_where_it_may(trained, name):
    jobs, report = trained
    losses, tensors = reference(name, {**OTHERS, **ALIKE}[name])
    found = report.jobs[name]
    assert found.captured == "captured", found.notes
    assert found.losses == losses
    assert all(map(torch.equal, tensors_of(jobs[name]), tensors))
    assert found.capture_shared_with == ("the first" if name in ALIKE else None)


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")  # where much is imported
def test_whose_code_reads_any_global_shares_nothing():
    names = {"first": 0.5, "second": 0.25}
    changes = {
        name: with_parts(loss=functools.partial(by_name, made_function(by=by)))
        for name, by in names.items()
    }
    with wf.Engine(memory="256MB", threads=1) as engine:
        for name, change in changes.items():
            engine.submit(trial(name, change)).result()
        report = engine.report()
    for name, change in changes.items():
        assert report.jobs[name].losses == reference(name, change)[0]
        assert report.jobs[name].capture_shared_with is None


def small(name, steps=3, change=None, on_step=None, lr=0.1):
    """A perceptron, small enough for many."""
    torch.manual_seed(len(name))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.25), nn.Linear(5, 3))
    if change is not None:
        change(model)
    optimizer = optim.Adam(model.parameters(), lr)
    data = [rows(8), rows(8, 1)]
    return wf.Job(name, model, optimizer, plain, data, steps=steps, seed=1, on_step=on_step)


def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def assert_equal_to_loop(make, job, report):
    own = make()
    assert report.losses == wf.run_eager(own, threads=1).losses
    assert all(map(torch.equal, tensors_of(job), tensors_of(own)))


def counted(monkeypatch):
    """The jobs that were traced, in turn."""
    traced, trace = [], step_builder.trace_forward

    def counting(job, *others):
        traced.append(job.name)
        return trace(job, *others)

    monkeypatch.setattr(step_builder, "trace_forward", counting)
    return traced


def test_64_equal_trials_that_come_together_are_captured_once(monkeypatch):
    traced = counted(monkeypatch)
    jobs = [small(f"trial {n}", lr=0.01 + n / 1000) for n in range(64)]
    report = wf.run(jobs, memory="64MB", threads=1)
    assert len(traced) == 1
    shared = [report.jobs[job.name].capture_shared_with for job in jobs]
    assert collections.Counter(shared) == {None: 1, traced[0]: 63}
    for n in (0, 31, 63):
        made = functools.partial(small, f"trial {n}", lr=0.01 + n / 1000)
        assert_equal_to_loop(made, jobs[n], report.jobs[f"trial {n}"])


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_trial_that_changes_its_model_concerns_nobody_else(which):
    def changing(job):
        def on_step(result):
            if result.step == 3:
                job[0].model[2].p = 0.5
            if result.step == 5:
                job[0].model[3].weight.requires_grad_(False)

        return on_step

    def made(name):
        held = []
        held.append(small(name, 8, on_step=changing(held) if name == which else lambda _: None))
        return held[0]

    jobs = [made(name) for name in ("first", "second", "third")]
    with wf.Engine(memory="64MB", threads=1) as engine:
        engine.hold()
        for job in jobs:
            engine.submit(job)
        engine.release()
    report = engine.report()
    for job in jobs:
        assert_equal_to_loop(functools.partial(made, job.name), job, report.jobs[job.name])
        assert report.jobs[job.name].recaptures == (2 if job.name == which else 0)


class Constant(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self, value, width=5):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.table = {"offset": torch.full((3,), value)}

    def forward(self, x):
        return self.linear(x) + self.table["offset"] + torch.tensor([0.5, 0.25, 0.125])


def constant(name, value, shared=None):
    torch.manual_seed(0)
    model = Constant(value)
    if shared is not None:
        model.table["offset"] = shared
    return wf.Job(name, model, momentum(model.parameters()), plain, [rows(8)], epochs=3, seed=0)


def test_each_trial_has_its_own_constants():
    """Those that come together, and one that comes when it is known what the step reads."""
    jobs = [constant(f"{value}", value) for value in (0.5, 2.0, -1.0)]
    with wf.Engine(memory="64MB", threads=1) as engine:
        for handle in [engine.submit(job) for job in jobs[:2]]:
            handle.result()
        engine.submit(jobs[2])
    report = engine.report()
    owners = [report.jobs[job.name].capture_shared_with for job in jobs]
    assert owners.count(None) == 1
    for job in jobs:
        make = functools.partial(constant, job.name, float(job.name))
        assert_equal_to_loop(make, job, report.jobs[job.name])


class Counting(nn.Module):
    """Writes to a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 3), [torch.zeros(())]

    def forward(self, x):
        self.held[0].add_(1)
        return self.linear(x) * self.held[0]


def test_a_constant_that_is_written_is_each_trials_own():
    def made(name):
        torch.manual_seed(0)
        model = Counting()
        return wf.Job(name, model, momentum(model.parameters()), plain, [rows(8)], epochs=3, seed=0)

    jobs = [made("a"), made("b")]
    report = wf.run(jobs, memory="64MB", threads=1)
    for job in jobs:
        assert_equal_to_loop(functools.partial(made, job.name), job, report.jobs[job.name])
        assert job.model.held[0] == 3


def test_a_mask_of_the_optimizers_own_is_each_trials_own():
    class Masked(optim.SGD):
        def __init__(self, parameters, value):
            super().__init__(parameters, lr=0.1)
            (group,) = self.param_groups
            self.masks = [torch.full_like(p, value) for p in group["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            (group,) = self.param_groups
            for parameter, mask in zip(group["params"], self.masks, strict=True):
                parameter.add_(parameter.grad * mask, alpha=-0.1)

    def made(name):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Masked(model.parameters(), float(name))
        return wf.Job(name, model, optimizer, plain, [rows(8)], epochs=3, seed=0)

    jobs = [made("0.5"), made("2.0")]
    report = wf.run(jobs, memory="64MB", threads=1)
    assert {report.jobs[job.name].capture_shared_with is None for job in jobs} == {True, False}
    for job in jobs:
        assert_equal_to_loop(functools.partial(made, job.name), job, report.jobs[job.name])


def reads_the_rate(optimizer, model, batch):
    return optimizer.param_groups[0]["lr"]


def reads_all_settings(optimizer, model, batch):
    return sum(v for k, v in optimizer.param_groups[0].items() if k == "lr")


def asks_the_scheduler(optimizer, model, batch):
    return optimizer.scheduler.get_last_lr()[0]


@pytest.mark.parametrize("rate", [reads_the_rate, reads_all_settings, asks_the_scheduler])
def test_a_rate_that_the_loss_reads_is_no_other_trials(rate):
    """Also where it counts only when the first check of the graph is long over."""

    def made(name):
        job = small(name, steps=8, lr={"a": 0.1, "b": 0.05, "c": 0.2}[name])
        optimizer = job.optimizer
        optimizer.scheduler = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        begins = [torch.zeros(()), torch.zeros(()), *[torch.ones(())] * 6]
        job.data = [(*rows(8, n), begin) for n, begin in enumerate(begins)]

        def loss(model, batch):
            return plain(model, batch) * (1 + rate(optimizer, model, batch) * batch[2])

        job.loss = loss
        return job

    jobs = [made(name) for name in "abc"]
    report = wf.run(jobs, memory="64MB", threads=1)
    for job in jobs:
        assert_equal_to_loop(functools.partial(made, job.name), job, report.jobs[job.name])


def test_code_that_may_look_at_addresses_shares_nothing(monkeypatch):
    def loss(model, batch):
        return plain(model, batch) * (0.5 if id(model) % 2 else 2.0)

    jobs = [small("a"), small("b")]
    for job in jobs:
        job.loss = loss
    report = wf.run(jobs, memory="64MB", threads=1)
    assert [report.jobs[job.name].capture_shared_with for job in jobs] == [None, None]


def test_a_builder_tells_whether_a_capture_would_be_shared():
    captures = SharedCaptures()
    flat = flatten(rows(8))
    first, second = (steps_of(small(name), captures=captures) for name in ("first", "2nd"))
    other = steps_of(small("other", change=lambda model: model[2].eval()), captures=captures)
    assert not second.builder.is_shared(flat)
    first.builder.build(flat)
    assert second.builder.is_shared(flat)
    assert not second.builder.is_shared(flatten(rows(6)))
    assert not other.builder.is_shared(flat)
    graphs = [each.builder.build(flat).steady.graph.graph for each in (first, second)]
    assert graphs[0] is graphs[1]


def test_captures_of_many_kinds_do_not_fill_the_memory(monkeypatch):
    """Those used last are kept: one that jobs go on to share stays."""
    monkeypatch.setattr(shared_captures, "_MOST_KEPT", 3)
    captures = SharedCaptures()

    def built(rows_of_batch):
        flat = flatten(rows(rows_of_batch))
        return weakref.ref(
            steps_of(small("a"), captures=captures).builder.build(flat).steady.graph.graph
        )

    graphs = {size: built(size) for size in (4, 5, 6)}
    assert built(4)() is graphs[4]()  # shared, so used last
    graphs |= {size: built(size) for size in (7, 8)}
    gc.collect()
    assert [size for size, graph in graphs.items() if graph() is not None] == [4, 7, 8]


def test_a_job_that_begins_is_not_given_what_another_has_captured_anew_later(monkeypatch):
    # A learning rate of zero is part of the first graphs; those captured later need state.
    def made(name, rate):
        job = small(name, 6)
        job.optimizer = optim.AdamW(job.model.parameters(), 0.1)
        job.scheduler = optim.lr_scheduler.LambdaLR(job.optimizer, rate)
        job.capture = True
        return job

    traced = counted(monkeypatch)
    with wf.Engine(memory="64MB", threads=1) as engine:
        for name, rate in [("warm", warm_up), ("later", decay), ("third", decay)]:
            job = made(name, rate)
            report = engine.submit(job).result()
            assert report.error is None
            assert_equal_to_loop(functools.partial(made, name, rate), job, report)
    assert traced == ["warm", "later"]


def warm_up(step):
    return step / 3


def decay(step):
    return 0.9**step


class Branching(optim.SGD):
    """Runs as eager Python where it looks at its gradients."""

    looks = True

    def step(self, closure=None):
        if self.looks and sum(p.grad.sum() for p in self.param_groups[0]["params"]) > 1e9:
            return None
        return super().step(closure)


def test_whether_an_optimizer_can_be_captured_is_its_own(monkeypatch):
    traced = counted(monkeypatch)

    def made(name, looks=True):
        job = small(name, 4)
        job.optimizer = Branching(job.model.parameters(), 0.1)
        job.optimizer.looks = looks
        return job

    with wf.Engine(memory="64MB", threads=1) as engine:
        kinds = {"first": True, "same": True, "blind": False, "again": True, "blind too": False}
        for name, looks in kinds.items():
            job = made(name, looks)
            job.capture = True
            report = engine.submit(job).result()
            assert_equal_to_loop(functools.partial(made, name, looks), job, report)
            eager = [note for note in report.notes if "Branching cannot be captured" in note]
            assert len(eager) == looks
    assert traced == ["first", "blind"]


@functools.cache
def weight_of(kind):
    return {"easy": 0.5, "hard": 2.0}[kind]


def test_jobs_whose_steps_ask_a_cache_of_plain_results_share():
    def loss(model, batch):
        return plain(model, batch) * weight_of("easy")

    wf.run([small("warm")], "8MiB", threads=1)  # torch's first step imports, by way of pytest
    weight_of("easy")
    jobs = [small(name) for name in ("a", "b")]
    for job in jobs:
        job.loss, job.capture = loss, True
    report = wf.run(jobs, "8MiB", threads=1)
    assert [job.captured for job in report] == ["captured"] * 2
    assert [job.capture_shared_with is None for job in report].count(True) == 1


def test_a_step_that_changes_a_batch_made_for_it_is_no_answer_for_data_that_are_kept():
    """A loader makes its batches anew; a list yields what the step has left of them."""

    def take(model, batch):
        factor = batch.pop("factor", 3.0)
        return model(batch["x"]).square().mean() * factor

    def made(name, loads):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        ones = [{"x": torch.ones(4), "factor": torch.tensor(1.0)} for _ in range(8)]
        loader = torch.utils.data.DataLoader(ones, 4)
        data = loader if loads else list(loader)
        return wf.Job(
            name,
            model=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, batch: take(model, batch).mean(),
            data=data,
            epochs=3,
            seed=0,
            capture=True if loads else "auto",
        )

    with wf.Engine(memory="64MiB", threads=1) as engine:
        first = engine.submit(made("loads", True)).result(300)
        second = engine.submit(made("keeps", False)).result(300)
    assert first.captured == "captured"
    assert second.capture_shared_with is None
    assert first.losses == wf.run_eager(made("loads", True), threads=1).losses
    assert second.losses == wf.run_eager(made("keeps", False), threads=1).losses
    assert first.losses != second.losses


@contextlib.contextmanager
def decimals_of(digits):
    with decimal.localcontext() as context:
        context.prec = digits
        yield


def by_decimals(model, batch):
    return plain(model, batch) * float(decimal.Decimal(1) / 3)


def by_numpy(model, batch):
    try:
        return plain(model, batch) * (1.0 if np.isinf(np.float64(1) / np.float64(0)) else 0.0)
    except FloatingPointError:
        return plain(model, batch) * 3.0


@pytest.mark.parametrize(
    ("loss", "around", "settings"),
    [
        (by_decimals, decimals_of, (28, 2)),
        (by_numpy, lambda how: np.errstate(divide=how), ("ignore", "raise")),
    ],
)
def test_jobs_that_were_submitted_under_other_settings_of_libraries_share_nothing(
    loss, around, settings
):
    def make(name):
        made = small("settings", steps=8)
        return wf.Job(name, made.model, made.optimizer, loss, [rows(8)] * 8, seed=1, capture=True)

    with wf.Engine(memory="64MB", threads=1) as engine:
        for number, setting in enumerate((*settings, *settings)):
            with around(setting):
                expected = wf.run_eager(make("loop"), threads=1).losses
                found = engine.submit(make(f"job-{number}")).result()
            assert found.losses == expected
            shared = None if number < 2 else f"job-{number - 2}"
            assert found.capture_shared_with == shared
