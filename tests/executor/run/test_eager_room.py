"""Eager steps in a room of their own: it grows, it refuses, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn, optim

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.differences import assert_same_numbers
from tests.support.models import Mlp
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.eager_room import EagerRoom
from waterflow.executor.run.lanes import Lanes

MiB = 1 << 20

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
]


# The room itself


class Budget:
    """An engine's lanes over four MiB, with a lane's thread for the room."""

    def __init__(self):
        self.lanes = Lanes(HostDevice(), 4 * MiB, 1, 1, 1)
        self.lanes.commit()
        self.room = EagerRoom(self.lanes, 0)

    @property
    def taken(self):
        return self.lanes.arena.statistics().allocated


@pytest.fixture
def budget():
    made = Budget()
    yield made
    made.room.retire()
    made.lanes.close()


def held(budget):
    return int(budget.lanes.arena.held(0))


def test_a_room_is_set_aside_and_given_back(budget):
    assert not budget.room.is_open
    assert budget.room.open(MiB, 0)
    assert budget.room.is_open
    assert MiB < held(budget) < 2 * MiB
    budget.room.close()
    budget.room.close()
    assert held(budget) == 0
    assert not budget.room.is_open


@pytest.mark.parametrize(("need", "left"), [(4 * MiB, 0), (2 * MiB, 3 * MiB)])
def test_a_room_that_leaves_too_little_is_not_opened(budget, need, left):
    assert not budget.room.open(need, left)
    assert not budget.room.is_open
    assert held(budget) == 0


def refuse(_):
    return False


def test_tensors_come_from_the_room(budget):
    budget.room.open(MiB, 0)
    with budget.room.scope(refuse):
        tensor = torch.empty(MiB // 8)
    assert MiB // 2 <= budget.room.peak < MiB
    assert held(budget) < 2 * MiB
    del tensor


def test_what_does_not_fit_is_refused(budget):
    budget.room.open(MiB, 0)
    asked = []
    with budget.room.scope(lambda size: bool(asked.append(size))):
        kept = torch.empty(MiB // 8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MiB // 4)
        again = torch.empty(MiB // 16)
    assert asked == [MiB]
    assert budget.room.is_open
    del kept, again


def test_a_room_grows_while_tensors_live_in_it(budget):
    budget.room.open(MiB, 0)
    with budget.room.scope(budget.room.grow):
        first = torch.full((MiB // 8,), 1.0)
        second = torch.full((MiB // 4,), 2.0)
        assert held(budget) >= 3 * MiB // 2
    assert first.eq(1).all()
    assert second.eq(2).all()
    assert not budget.room.grow(4 * MiB)
    assert budget.room.is_open, "it keeps what it had"
    assert first.eq(1).all()


def test_a_room_takes_the_gaps_that_there_are(budget):
    """Nothing lies in what is set aside for it."""
    arena = budget.lanes.arena
    blocks = [arena.allocate(MiB // 2, 0, 1) for _ in range(8)]
    for block in blocks[::2]:
        arena.free(block, 0)
    arena.synchronize()
    assert budget.room.open(MiB // 2, 0)
    with budget.room.scope(budget.room.grow):
        kept = torch.ones(3 * MiB // 8)
    assert held(budget) >= 3 * MiB // 2
    assert not budget.room.grow(MiB)
    assert held(budget) <= 2 * MiB
    budget.room.close()
    assert held(budget) == 0
    assert kept.eq(1).all()
    for block in blocks[1::2]:
        arena.free(block, 0)
    arena.synchronize()
    assert arena.statistics().live == 0


def test_a_room_that_was_closed_opens_for_what_still_lives_in_it(budget):
    budget.room.open(MiB, 0)
    with budget.room.scope(refuse):
        kept = torch.ones(MiB // 8)
    budget.room.close()
    assert budget.room.open(1, 0)
    assert held(budget) >= MiB // 2
    assert kept.eq(1).all()


# Opaque jobs beside captured ones


class Growing(nn.Module):
    """A model whose steps need more memory each time."""

    def __init__(self, by):
        super().__init__()
        self.one, self.by, self.calls = nn.Linear(4, 3), by, 0

    def forward(self, x):
        self.calls += 1
        wide = self.one(x).sum() * torch.ones(self.calls * self.by // 4)
        return self.one(x) + 1e-9 * wide.sigmoid().sum()


def job_of(name, model, steps=12, **options):
    torch.manual_seed(11)
    net = model()
    return wf.Job(
        name,
        model=net,
        optimizer=optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=cross_entropy,
        data=[rows(8)] * steps,
        seed=5,
        **options,
    )


def run(*jobs, memory, policy="flow", seconds=30):
    """A run that ends in time, or fails the test."""
    done = []
    thread = threading.Thread(
        target=lambda: done.append(wf.run(list(jobs), memory=memory, policy=policy, threads=1)),
        daemon=True,
    )
    thread.start()
    thread.join(seconds)
    assert done, "it hangs, or has raised"
    return done[0]


def assert_equal_to_loop(job, report, model, **options):
    expected = job_of(job.name, model, **options)
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, report)


def growing():
    return Growing(MiB // 4)


def wide():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("policy", ["flow", "waterwave", "temporal"])
def test_steps_that_need_more_and_more(policy):
    opaque, captured = job_of("a", growing), job_of("b", wide, steps=200)
    report = run(opaque, captured, memory=24 * MiB, policy=policy)
    assert report.jobs["a"].captured == "opaque step"
    assert report.jobs["b"].captured == "captured", report.jobs["b"].notes
    assert report.peak_bytes <= 24 * MiB
    assert_equal_to_loop(opaque, report.jobs["a"], growing)
    assert_equal_to_loop(captured, report.jobs["b"], wide, steps=200)


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("policy", ["flow", "waterwave"])
def test_without_memory_it_ends_alone(policy):
    opaque, captured = job_of("a", growing, steps=60), job_of("b", wide, steps=100)
    report = run(opaque, captured, memory=8 * MiB, policy=policy)
    assert report.jobs["a"].state == "out_of_memory"
    assert 3 < report.jobs["a"].steps < 30
    assert report.peak_bytes <= 8 * MiB
    assert_equal_to_loop(captured, report.jobs["b"], wide, steps=100)


def broad():
    """Its step holds about two MiB."""
    return nn.Sequential(nn.Linear(4, 256), *(nn.Linear(256, 256) for _ in range(2)))


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_an_opaque_job_that_has_no_room_beside_others_runs_in_turn():
    def opaque():
        return job_of("a", broad, capture=False, steps=6)

    alone = run(opaque(), memory=64 * MiB).jobs["a"]
    beside = run(job_of("b", broad), memory=64 * MiB).jobs["b"]
    both = alone.persistent_bytes + beside.persistent_bytes
    transient = max(alone.solo_peak_bytes - alone.persistent_bytes, 0)
    tight = both + int(1.25 * max(transient, beside.solo_peak_bytes - beside.persistent_bytes))
    jobs = opaque(), job_of("b", broad)
    report = run(*jobs, memory=tight)
    assert report.peak_bytes <= tight
    assert_equal_to_loop(jobs[0], report.jobs["a"], broad, steps=6)
    assert_equal_to_loop(jobs[1], report.jobs["b"], broad)


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_two_growing_jobs_and_a_captured_one():
    jobs = job_of("a", growing), job_of("b", growing), job_of("c", Mlp, steps=150)
    report = run(*jobs, memory=32 * MiB)
    assert report.peak_bytes <= 32 * MiB
    for job, model, steps in zip(jobs, (growing, growing, Mlp), (12, 12, 150), strict=True):
        assert_equal_to_loop(job, report.jobs[job.name], model, steps=steps)
