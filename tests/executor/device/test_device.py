"""What every device promises an engine, on each one: `executor/device/base.py` says what that is.

Here the same tests run on the host and on the CUDA device over the stand-in driver, whose streams
do their work late. A new device becomes an entry of `DEVICES`. What is special about one is tested
where it is: tests/fakecuda for CUDA's, tests/executor/run for what the host's keeps in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import FakeDriver, nothing_left
from tests.support.fake_device import FakeCudaDevice
from waterflow.allocator_ext import _C
from waterflow.common.errors import JobError
from waterflow.executor.device.base import Device
from waterflow.executor.device.host import HostDevice
from waterflow.executor.device.storages import rounded
from waterflow.executor.run.residency import Residency

MIB = 1 << 20
BUDGET = 8 * MIB
TOTAL = 1 << 30  # of the fake device
LANES = 2


@dataclass
class Kind:
    """A kind of device, and what the tests must know of it.

    Attributes:
        make: a device.
        too_much: a budget that it must refuse.
        taken: bytes of the system's memory that devices hold, None where nobody can tell.
        spoil: makes the budget unavailable between `open` and `commit`.
        break_down: makes the device fail for good.
    """

    make: Callable[[], Device]
    too_much: int
    taken: Callable[[], int] | None = None
    spoil: Callable[[], None] | None = None
    break_down: Callable[[], None] | None = None


@contextlib.contextmanager
def host() -> Iterator[Kind]:
    yield Kind(HostDevice, too_much=1 << 60)


@contextlib.contextmanager
def cuda() -> Iterator[Kind]:
    driver = FakeDriver()
    driver.reset()
    driver.memory(TOTAL)
    with nothing_left(driver):
        driver.delay(300, seed=1)
        yield Kind(
            FakeCudaDevice,
            too_much=2 * TOTAL,
            taken=lambda: driver.live("memory_bytes"),
            spoil=lambda: driver.fail("cuMemCreate", 1, 2),
            break_down=lambda: driver.sticky(700),
        )


DEVICES = {"host": host, "cuda": cuda}
HOST = pytest.param("host", marks=pytest.mark.cpu)
CUDA = pytest.param("cuda", marks=pytest.mark.fakecuda)

#: Marks of tests that have no meaning for all of them.
with_a_system_that_tells = pytest.mark.parametrize("kind", [CUDA], indirect=True)


@pytest.fixture(params=[HOST, CUDA])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with DEVICES[request.param]() as made:
        yield made
        request.node.funcargs.clear()  # pytest would keep what other fixtures have made


@dataclass
class Opened:
    """A device as an engine has it."""

    device: Device
    arena: Any
    executes: Any

    def write(self, pointer: int, size: int, value: int) -> None:
        """As the fake device's memory is the host's."""
        ctypes.memset(pointer, value, size)


@contextlib.contextmanager
def opened(device: Device, budget: int = BUDGET, lanes: int = LANES) -> Iterator[Opened]:
    _C.install_lane_allocator()
    arena, executes = device.open(budget, lanes)
    _C.register_arena(arena)
    try:
        yield Opened(device, arena, executes)
    finally:
        _C.retire_arena(arena)
        with contextlib.suppress(RuntimeError):
            arena.give_back()
        device.close()


@pytest.fixture
def engine(kind: Kind) -> Iterator[Opened]:
    with opened(kind.make()) as made:
        made.device.commit(made.arena)
        yield made


# What it is


def test_attributes(kind: Kind) -> None:
    device = kind.make()
    assert device.name
    assert isinstance(device.tensors, torch.device)
    assert device.alignment > 0
    assert device.alignment & (device.alignment - 1) == 0
    assert device.failure() == ""
    assert device.workspace_bytes >= 0


def test_equal_devices_have_one_identity(kind: Kind) -> None:
    assert kind.make().identity
    assert kind.make().identity == kind.make().identity


# The arena


def test_the_arena_is_empty_and_counts_the_budget(engine: Opened) -> None:
    statistics = engine.arena.statistics()
    assert statistics.capacity == BUDGET
    assert statistics.live == 0
    assert engine.arena.alignment == engine.device.alignment
    assert engine.arena.live_end == 0


def test_the_arena_never_gives_out_more_than_the_budget(engine: Opened) -> None:
    assert engine.arena.allocate(BUDGET + 1, 0, 0) is None
    whole = engine.arena.allocate(BUDGET, 0, 0)
    assert whole is not None
    assert engine.arena.allocate(1, 1, 1) is None
    engine.arena.free(whole, 0)


@pytest.mark.parametrize("lane", range(LANES))
def test_each_lane_has_its_memory_from_end_to_end(engine: Opened, lane: int) -> None:
    pointer = engine.arena.allocate(BUDGET, lane, 0)
    engine.write(pointer, BUDGET, 0xAB)
    assert ctypes.string_at(pointer + BUDGET - 1, 1) == b"\xab"
    engine.arena.free(pointer, lane)


def test_a_budget_that_cannot_be_had_is_refused_with_a_reason(kind: Kind) -> None:
    with pytest.raises(JobError, match=r"a budget of .*cannot be had: ."):
        kind.make().open(kind.too_much, LANES)
    with opened(kind.make()) as engine:  # and nothing of it stays in the way
        engine.device.commit(engine.arena)


@with_a_system_that_tells
def test_nothing_of_the_budget_is_taken_before_the_commit(kind: Kind) -> None:
    assert kind.taken is not None
    before = kind.taken()
    with opened(kind.make()) as engine:
        assert kind.taken() == before
        engine.device.commit(engine.arena)
        assert kind.taken() - before >= BUDGET


@with_a_system_that_tells
def test_a_commit_that_fails_says_so(kind: Kind) -> None:
    assert kind.spoil is not None
    with opened(kind.make()) as engine:
        kind.spoil()
        with pytest.raises(JobError, match="cannot be had any more"):
            engine.device.commit(engine.arena)
        engine.device.commit(engine.arena)


def test_what_a_tensor_holds_outlives_the_device(kind: Kind) -> None:
    with opened(kind.make()) as engine:
        engine.device.commit(engine.arena)
        with _C.LaneScope(engine.arena, 0, 0):
            tensor = torch.empty(MIB, dtype=torch.uint8, device=engine.device.tensors)
        assert engine.arena.owns(tensor.data_ptr())
        tensor.fill_(7)
    del engine
    gc.collect()
    assert tensor.eq(7).all()


@with_a_system_that_tells
def test_closing_leaves_nothing_once_the_arena_is_gone(kind: Kind) -> None:
    assert kind.taken is not None
    before = kind.taken()
    with opened(kind.make()) as engine:
        engine.device.commit(engine.arena)
        engine.arena.free(engine.arena.allocate(MIB, 0, 0), 0)
    del engine
    gc.collect()
    assert kind.taken() == before


def test_memory_that_torch_keeps_may_be_asked_back_at_any_time(kind: Kind) -> None:
    device = kind.make()
    device.release_unused()
    with opened(device) as engine:
        engine.device.release_unused()


# Lanes


def test_marks_of_a_lane_are_reached_in_order(engine: Opened) -> None:
    for lane in range(LANES):
        marks = [engine.executes.mark(lane) for _ in range(20)]
        engine.executes.wait(marks[-1])
        times = [engine.executes.seconds(mark) for mark in marks]
        assert times == sorted(times)


def test_a_mark_has_the_time_of_the_steady_clock(engine: Opened) -> None:
    time.sleep(0.02)  # twenty seconds off where milliseconds are taken for seconds
    earliest = time.monotonic()
    mark = engine.executes.mark(0)
    engine.executes.wait(mark)
    assert earliest - 5 < engine.executes.seconds(mark) < time.monotonic() + 5


def test_only_a_device_that_queues_leaves_work_for_later(engine: Opened) -> None:
    """A mark that is not reached has no time: on the fake device each takes a moment."""

    def is_reached() -> bool:
        try:
            engine.executes.seconds(engine.executes.mark(0))
        except RuntimeError:
            return False
        return True

    reached = [is_reached() for _ in range(20)]
    engine.executes.wait(engine.executes.mark(0))
    assert all(reached) != engine.device.queues


def test_every_lane_is_adopted_on_its_own_thread_and_works_there(engine: Opened) -> None:
    pool = _C.LanePool(engine.arena, LANES, engine.executes)
    worked: dict[int, int] = {}

    def serve() -> None:
        engine.device.adopt_lane(1)
        pool.serve(1)

    worker = threading.Thread(target=serve)
    worker.start()
    engine.device.adopt_lane(0)
    pool.run_on_all(lambda lane: worked.__setitem__(lane, threading.get_ident()))
    pool.shutdown()
    worker.join()
    assert sorted(worked) == [0, 1]
    assert len(set(worked.values())) == LANES
    assert engine.device.workspace_bytes >= 0
    engine.device.wait_for_thread()


# Measurements


def test_a_scratch_arena_is_apart_from_the_budget_and_from_others(engine: Opened) -> None:
    before = engine.arena.statistics().live
    arenas = [engine.device.scratch()[0] for _ in range(2)]
    spans = []
    for arena in arenas:
        pointer = arena.allocate(2 * BUDGET, 0, 0)  # a step may be larger than the budget
        assert pointer is not None
        engine.write(pointer, 2 * BUDGET, 1)
        assert arena.alignment == engine.device.alignment
        assert not engine.arena.owns(pointer)
        spans.append((pointer, pointer + 2 * BUDGET))
        arena.free(pointer, 0)
        arena.finish()
    (first, second) = sorted(spans)
    assert first[1] <= second[0]
    assert engine.arena.statistics().live == before


@with_a_system_that_tells
def test_scratch_memory_is_the_systems_again_when_the_arena_is_gone(kind: Kind) -> None:
    assert kind.taken is not None
    with opened(kind.make()) as engine:
        before = kind.taken()
        arena, _ = engine.device.scratch()
        arena.free(arena.allocate(BUDGET, 0, 0), 0)
        assert kind.taken() > before
        arena.finish()
        del arena
        gc.collect()
        assert kind.taken() == before


def test_what_executes_on_a_scratch_arena_tells_the_time(engine: Opened) -> None:
    _, executes = engine.device.scratch()
    first, second = executes.mark(0), executes.mark(0)
    executes.wait(second)
    assert executes.seconds(first) <= executes.seconds(second)


def test_a_measurement_returns_or_raises_what_it_does(engine: Opened) -> None:
    assert engine.device.profile(lambda: 5) == 5

    def fail() -> None:
        raise KeyError("measured")

    with pytest.raises(KeyError, match="measured"):
        engine.device.profile(fail)
    assert engine.device.profile(lambda: 6) == 6


def test_measurements_of_a_device_that_queues_run_one_at_a_time(engine: Opened) -> None:
    if not engine.device.queues:
        assert engine.device.profile(threading.get_ident) == threading.get_ident()
        return
    free = threading.Lock()
    collisions = []

    def measure() -> None:
        alone = free.acquire(blocking=False)
        collisions.extend([] if alone else [1])
        time.sleep(0.002)
        if alone:
            free.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: engine.device.profile(measure), range(8)))
    assert not collisions


# What jobs get


def test_a_random_stream_repeats(kind: Kind) -> None:
    device = kind.make()
    streams = [device.generator(seed) for seed in (3, 3, 4)]
    if streams[0] is None:  # the host's serves
        assert device.tensors.type == "cpu"
        return
    drawn = [torch.rand(8, generator=stream, device=device.tensors) for stream in streams]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_batches_arrive_where_they_are_not_there_already(engine: Opened) -> None:
    device_input = engine.device.device_input()
    if device_input is None:
        with pytest.raises(NotImplementedError, match="needs no page-locked memory"):
            engine.device.pinned(64)
        return
    buffer = engine.device.pinned(MIB)
    assert buffer.tensor().shape == (MIB,)
    pointer = engine.arena.allocate(MIB, 0, 0)
    block = torch.frombuffer((ctypes.c_ubyte * MIB).from_address(pointer), dtype=torch.uint8)
    for value in (1, 2):
        buffer.tensor().fill_(value)
        device_input.send(buffer, block, MIB)
        buffer.wait()
        assert block.eq(value).all()
    assert engine.device.device_input() is not device_input
    engine.arena.free(pointer, 0)


def test_persistent_tensors_are_counted_and_keep_their_address_where_it_says_so(
    engine: Opened,
) -> None:
    residency = Residency(engine.arena, engine.device)
    tensor = torch.arange(1000.0, device=engine.device.tensors)
    values, pointer = tensor.tolist(), tensor.data_ptr()
    residency.move_in(3, [tensor])
    assert engine.arena.held(3) == rounded(4000, engine.device.alignment)
    if engine.device.keeps_in_place:
        assert tensor.data_ptr() == pointer
    else:
        assert engine.arena.owns(tensor.data_ptr())
    assert tensor.tolist() == values
    residency.move_out(3, [tensor])
    assert engine.arena.held(3) == 0
    assert not engine.arena.owns(tensor.data_ptr())
    assert tensor.tolist() == values


# Faults


@with_a_system_that_tells
def test_a_broken_device_says_what_has_broken_it(kind: Kind) -> None:
    assert kind.break_down is not None
    with opened(kind.make()) as engine:
        engine.device.commit(engine.arena)
        assert engine.device.failure() == ""
        kind.break_down()
        with pytest.raises(RuntimeError):
            engine.executes.wait(engine.executes.mark(0))
        assert engine.device.failure()
        with contextlib.suppress(RuntimeError):
            engine.arena.synchronize()
        FakeDriver().reset()
