"""Who goes first on a device: streams of higher priority, and little queued of the others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS
from tests.support.waiting import wait_until
from waterflow.allocator_ext import _C

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

USUAL, GREATEST = 0, -5
#: Work items by which two lanes try their streams.
_TRIED = 4


def make(name: str, **options: Any) -> wf.Job:
    job = MODELS[name](epochs=3)
    for key, value in options.items():
        setattr(job, key, value)
    return job


def run(jobs: list[wf.Job], **options: Any) -> wf.Report:
    return wf.run(jobs, "64MiB", device=FakeCudaDevice(), threads=1, **options)


def test_a_guaranteed_job_has_streams_of_the_greatest_priority(driver: FakeDriver) -> None:
    driver.delay(100, seed=1)
    first, other = make("cnn", priority="guaranteed"), make("noisy", priority="opportunistic")
    report = run([first, other])
    for job in (first, other):
        expected = make(job.name)
        assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, report[job.name])
    assert driver.items(GREATEST) > _TRIED + 10
    assert driver.items(USUAL) > 50


def test_equals_have_the_usual_one(driver: FakeDriver) -> None:
    assert run([make("cnn"), make("noisy")]).ok
    assert driver.items(GREATEST) <= _TRIED


def test_a_device_without_priorities(driver: FakeDriver) -> None:
    driver.priorities(0, 0)
    first, other = make("cnn", priority="guaranteed"), make("noisy", priority="opportunistic")
    assert run([first, other]).ok
    assert driver.items(GREATEST) == 0


#: What torch asks its own runtime for, where it has one, nobody answers beside a stand-in.
needs_no_runtime = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch is built for CUDA"
)


@needs_no_runtime
def test_a_lane_is_in_order_whatever_its_priority(fake: FakeDriver) -> None:
    """Marks of one lane come one after another, on whichever of its streams they are."""
    fake.delay(2000, seed=3)
    streams = _C.LaneStreams(_C.CudaDevice(str(fake.path), 0), 1)
    device = _C.LaneDevice.cuda(streams, False)
    marks = []
    for number in range(40):
        device.set_first(0, number % 3 == 1)
        marks.append(device.mark(0))
    device.wait(marks[-1])
    seconds = [device.seconds(mark) for mark in marks]
    assert np.all(np.diff(seconds) > -1e-4)  # a device counts in single precision


def steps_queued_at_most(fake: FakeDriver, first: bool) -> int:
    """Pieces of a long step that were queued, or under way, while others that go first worked."""
    streams = _C.LaneStreams(_C.CudaDevice(str(fake.path), 0), 1)
    arena = _C.Arena.cuda(streams, 1 << 20, host_tensors=True)
    pool = _C.LanePool(arena, 1, _C.LaneDevice.cuda(streams, False))
    precedence, signal = _C.Precedence(), _C.Signal()
    throttle = _C.Throttle(precedence, signal)
    throttle.first = first
    length = 320
    tape = _C.Tape(0, 2)
    for _ in range(length):
        tape.add_arithmetic(_C.Arithmetic.ADD, 0, 0, 1, [])
    nothing = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
    plan = _C.MemoryPlan(nothing, np.empty(0, np.int32), length, [], arena.version)
    _C.begin_plans(arena, [(plan, 0)], _C.RoundMemory(0, 0), True)
    demand = _C.Demand([0], [0, 0])
    step = _C.FlowStep((tape, plan, 0, None), [(0, length)], demand, [1.0], throttle)
    precedence.enter()
    try:
        result = pool.run_step(0, step, _C.Gate(1 << 20, 1), None)
        queued = fake.busy()
    finally:
        precedence.leave()
    result.wait()
    return queued


@needs_no_runtime
def test_little_is_queued_of_a_job_that_others_go_before(fake: FakeDriver) -> None:
    """Where the host would else have queued all of a step, two pieces of it remain."""
    fake.delay(3000, seed=4)
    assert steps_queued_at_most(fake, first=False) <= 5  # their marks, and those of group and step
    fake.delay(3000, seed=4)
    wait_until(lambda: fake.busy() == 0)
    assert steps_queued_at_most(fake, first=True) <= 5  # one piece
    gc.collect()
