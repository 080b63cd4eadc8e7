"""Copies between a device's arena and page-locked memory, by the driver's own copies: a tape whose
storage leaves and comes back, queued by one lane that nobody waits for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.fake_cuda import FakeDriver
from waterflow.allocator_ext import _C

pytestmark = pytest.mark.fakecuda

MIB = 1 << 20
END = _C.MoveEnd


class Moving:
    """A step of one job that moves a tensor out of the arena and back into it."""

    def __init__(self, driver: FakeDriver, ends: list[_C.MoveEnd], copies: bool = True) -> None:
        device = _C.CudaDevice(str(driver.path), 0)
        self.device = device
        self.streams = _C.LaneStreams(device, 1)
        self.arena = _C.Arena.cuda(self.streams, 8 * MIB, host_tensors=True)
        self.arena.commit()
        _C.install_lane_allocator()
        _C.register_arena(self.arena)
        # The driver copies by itself, as it does on a GPU.
        self.pool = _C.LanePool(self.arena, 1, _C.LaneDevice.cuda(self.streams, False))
        self.tier = _C.DeviceTier(device, MIB, False)
        self.tape = _C.Tape(1, 0)
        for end in ends:
            self.tape.add_move(end, 0, 0 if end is END.LEAVE else -1, 0, copies)
        self.tape.set_tier(self.tier)
        self.length = len(ends)
        with _C.LaneScope(self.arena, 0, 0):
            self.tensor = torch.arange(MIB // 4, dtype=torch.float32)
        self.view = self.tensor[5:9]
        self.tape.set_slot(0, self.tensor)

    def queue(self) -> _C.RoundResult:
        nothing = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
        plan = _C.MemoryPlan(nothing, np.empty(0, np.int32), self.length, [], self.arena.version)
        _C.begin_plans(self.arena, [(plan, 0)], _C.RoundMemory(2 * MIB, 8 * MIB), False)
        demand = _C.Demand([0], [0, 0])
        step = _C.FlowStep((self.tape, plan, 0, None), [(0, self.length)], demand)
        return self.pool.run_step(0, step, _C.Gate(8 * MIB, 1))

    @property
    def is_inside(self) -> bool:
        return bool(_C.is_in_arena(self.tensor.untyped_storage().data_ptr()))

    def close(self) -> None:
        self.tape.clear([0])
        del self.tensor, self.view
        _C.retire_arena(self.arena)


@pytest.fixture
def driver(fake: FakeDriver) -> Iterator[FakeDriver]:
    fake.memory(1 << 30)
    yield fake
    fake.reset()
    gc.collect()


def test_a_storage_that_was_away_has_its_bytes_again(driver: FakeDriver) -> None:
    moving = Moving(driver, [END.LEAVE, END.GONE, END.FETCH, END.BACK])
    driver.delay(2000, seed=1)
    copies = driver.calls("cuMemcpyAsync")
    result = moving.queue()
    assert driver.busy() > 0  # the host has waited for nothing
    result.wait()
    assert driver.calls("cuMemcpyAsync") == copies + 2
    assert moving.is_inside
    assert torch.equal(moving.tensor, torch.arange(MIB // 4, dtype=torch.float32))
    assert moving.view.tolist() == [5, 6, 7, 8]
    assert moving.tier.moved == 2 * MIB
    assert moving.device.pinned == MIB
    moving.close()


def test_while_it_is_away_its_place_is_in_the_tier(driver: FakeDriver) -> None:
    moving = Moving(driver, [END.LEAVE, END.GONE])
    driver.delay(1000, seed=2)
    moving.queue().wait()
    assert not moving.is_inside
    assert int(moving.arena.statistics().live) == 0
    assert moving.view.tolist() == [5, 6, 7, 8]
    moving.close()


def test_without_waits_its_bytes_are_others(driver: FakeDriver) -> None:
    """The tests of the order can fail: the copy in is begun before the copy out is done."""
    for seed in range(8):
        moving = Moving(driver, [END.LEAVE, END.GONE, END.FETCH, END.BACK])
        driver.delay(3000, seed=seed)
        driver.ignore_waits()
        moving.queue().wait()
        seen = moving.tensor.clone()
        driver.reset()
        driver.memory(1 << 30)
        while driver.busy():
            pass
        moving.close()
        if not torch.equal(seen, torch.arange(MIB // 4, dtype=torch.float32)):
            return
    pytest.fail("the bytes were right although nothing waited")


@pytest.mark.parametrize("symbol", ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_call_that_fails_is_the_step_s_error(symbol: str, driver: FakeDriver) -> None:
    moving = Moving(driver, [END.LEAVE, END.GONE, END.FETCH, END.BACK])
    driver.fail(symbol, 2, 1)
    (error,) = moving.queue().errors
    assert symbol in str(error)
    assert int(moving.arena.statistics().live) <= MIB
    moving.close()


def test_memory_that_cannot_be_locked(driver: FakeDriver) -> None:
    device = _C.CudaDevice(str(driver.path), 0)
    driver.fail("cuMemHostAlloc", 1, 2)
    with pytest.raises(RuntimeError, match=r"cuMemHostAlloc.*page-locked"):
        _C.DeviceTier(device, MIB, False)
    assert device.pinned == 0
