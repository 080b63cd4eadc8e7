"""A trace is undone: what the user's code has changed in it is as if it had not run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn import functional as F

import waterflow as wf
from tests.support.data import rows
from tests.support.differences import MEMORY
from tests.support.models import Mlp
from waterflow.capture.side_effects import TraceWatch
from waterflow.executor.run.rng import JobRng

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning"),
]

COUNTS = {"calls": 0, "list": [], "set": set()}
CALLS = 0


def moving(model, batch):
    """Moves all that a loss may move."""
    global CALLS
    CALLS += 1
    COUNTS["calls"] += 1
    COUNTS["list"].append(COUNTS["calls"])
    COUNTS["set"].add(COUNTS["calls"])
    model.calls = getattr(model, "calls", 0) + 1
    x, y = batch
    return F.cross_entropy(model(x), y)


def drawing(model, batch):
    x, y = batch
    torch.randn(3), random.random(), np.random.rand()
    return F.cross_entropy(model(x), y)


def tuning(model, batch):
    group = model.optimizer.param_groups[0]
    group["lr"] *= 0.5
    x, y = batch
    return F.cross_entropy(model(x), y)


def plain(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def job_of(loss=plain, name="a", steps=6, **options):
    torch.manual_seed(11)
    net = Mlp()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    vars(net)["optimizer"] = optimizer
    return wf.Job(
        name,
        model=net,
        optimizer=optimizer,
        loss=loss,
        data=[rows(8)] * steps,
        seed=5,
        **options,
    )


def state_of(job):
    counts = {key: list(value) if key != "calls" else value for key, value in COUNTS.items()}
    return CALLS, counts, getattr(job.model, "calls", None), job.optimizer.param_groups[0]["lr"]


LOSSES = {
    "state": (moving, "changes"),
    "draws": (drawing, "random"),
    "hyperparameter": (tuning, "hyperparameter 'lr'"),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_trace_is_undone(name, raises):
    loss, _ = LOSSES[name]
    job, rng = job_of(loss), JobRng(3)
    before, streams = state_of(job), rng.state()
    own = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    def trace():
        loss(job.model, job.data[0])
        if raises:
            raise ZeroDivisionError

    def watched():
        with TraceWatch(job, rng) as watch:
            watch.run(trace)

    if raises:
        with pytest.raises(ZeroDivisionError):
            watched()
    else:
        watched()
    assert state_of(job) == before
    assert torch.equal(rng.state().host, streams.host)
    assert rng.state().python == streams.python
    assert random.getstate() == own[0]
    assert np.random.get_state()[1].tolist() == own[1]
    assert torch.equal(torch.get_rng_state(), own[2])


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_trace_did_is_said(name):
    loss, words = LOSSES[name]
    job = job_of(loss)
    before = state_of(job)
    with TraceWatch(job, JobRng(3)) as watch:
        watch.run(lambda: loss(job.model, job.data[0]))
        assert words in watch.problem()
        assert state_of(job) == before
        assert watch.problem() is None
        watch.run(lambda: plain(job.model, job.data[0]))
        assert watch.problem() is None


@pytest.mark.parametrize("name", LOSSES)
def test_a_job_that_moves_state_ends_where_the_loop_does(name):
    loss, _ = LOSSES[name]

    def ended(train):
        global CALLS
        CALLS = 0
        COUNTS.update(calls=0, list=[], set=set())
        job = job_of(loss)
        report = train(job)
        return report.losses, state_of(job)

    expected = ended(lambda job: wf.run_eager(job, threads=1))
    found = ended(lambda job: wf.run([job], memory=MEMORY, threads=1).jobs["a"])
    assert found == expected


SHARED = {"calls": 0}


def counting(model, batch):
    SHARED["calls"] += 1
    return plain(model, batch)


def sees_it(model, batch):
    """Reads what the other counts; each new value would be a new capture."""
    assert SHARED["calls"] >= 0
    return plain(model, batch)


@pytest.mark.parametrize("policy", ["flow", "waterwave"])
def test_no_count_is_lost_where_another_job_is_traced(policy):
    SHARED["calls"] = 0
    sizes = [(rows(n)[0], rows(n)[1]) for n in range(2, 22)]
    counts = job_of(counting, "counts", steps=60)
    traced = job_of(sees_it, "traced")
    traced.data = sizes
    report = wf.run([counts, traced], memory=MEMORY, policy=policy, threads=1)
    assert report.ok, [job.error for job in report]
    assert SHARED["calls"] == 60
    assert report.jobs["counts"].losses == wf.run_eager(job_of(steps=60), threads=1).losses


def test_what_cannot_be_put_back_after_a_trace_is_said():
    held = np.zeros(2, dtype=[("a", "f4")])

    def loss(model, batch):
        names = held.dtype.names  # which belong to the type, and no copy of the array keeps
        held.dtype.names = ("b",) if names == ("a",) else ("a",)
        return F.mse_loss(model(batch[0]), batch[1])

    with pytest.warns(wf.OpaqueStepWarning, match="could not be put back"):
        report = wf.run([job_of(loss)], memory=MEMORY).jobs["a"]
    assert any("could not be put back" in note for note in report.notes)
