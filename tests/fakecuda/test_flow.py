"""Flowing steps on a device: queued lane by lane, done in the order that their job needs."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import waterflow as wf
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS
from waterflow.allocator_ext import _C
from waterflow.executor.run.lanes import Lanes

pytestmark = pytest.mark.fakecuda

Interval = tuple[float, float]


@pytest.fixture
def driver(fake: FakeDriver) -> Iterator[FakeDriver]:
    fake.memory(1 << 30)
    fake.delay(2000, seed=4)
    yield fake
    fake.reset()


def hop(driver: FakeDriver, steps: int, behind_each_other: bool) -> list[Interval]:
    """One job's steps, queued on two lanes in turn: when the device did each."""
    streams = _C.LaneStreams(_C.CudaDevice(str(driver.path), 0), 2)
    arena = _C.Arena.cuda(streams, 1 << 20, host_tensors=True)
    pool = _C.LanePool(arena, 2, _C.LaneDevice.cuda(streams, False))
    gate = _C.Gate(1 << 20, 2)
    nothing = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
    memory_plan = _C.MemoryPlan(nothing, np.empty(0, np.int32), 0, [], arena.version)
    step = _C.FlowStep((_C.Tape(0, 0), memory_plan, 0, None), [(0, 0)], _C.Demand([0], [0, 0]))
    results: list[_C.RoundResult] = []
    for number in range(steps):
        _C.begin_plans(arena, [(memory_plan, 0)], _C.RoundMemory(0, 0), True)
        former = results[-1] if results and behind_each_other else None
        results.append(pool.run_step(number % 2, step, gate, former))
    for result in results:
        result.wait()
    return [result.spans()[0][3:] for result in results]


def are_in_order(intervals: list[Interval]) -> bool:
    tolerance = 1e-4  # a device counts in single precision
    return all(a[1] <= b[0] + tolerance for a, b in itertools.pairwise(intervals))


def test_a_job_that_changes_lanes_waits_for_its_step_on_the_other(driver: FakeDriver) -> None:
    assert are_in_order(hop(driver, 12, behind_each_other=True))


def test_without_the_former_step_there_is_no_order(driver: FakeDriver) -> None:
    assert not are_in_order(hop(driver, 12, behind_each_other=False))


def test_the_engine_queues_a_step_behind_the_job_s_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On whichever lane; only the first of a stretch has nothing to wait for."""
    formers: list[Any] = []
    original = Lanes.run_step

    def run_step(lanes: Lanes, lane: int, step: Any, gate: Any, former: Any) -> Any:
        formers.append(former)
        return original(lanes, lane, step, gate, former)

    monkeypatch.setattr(Lanes, "run_step", run_step)
    engines_driver = FakeDriver()
    engines_driver.reset()
    engines_driver.memory(2 << 30)
    job = MODELS["plain"](steps=12, epochs=None)
    # Checks of the numbers would end stretches in between.
    options = {"policy": "flow", "threads": 1, "audit": "off"}
    report = wf.run([job], "64MiB", device=FakeCudaDevice(), **options)
    assert report[job.name].steps == 12
    assert len(formers) >= 8
    assert all(isinstance(former, _C.RoundResult) for former in formers[1:])
    gc.collect()
    engines_driver.reset()
