"""One conformance suite for every arena, then what only one of them has."""

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

CAPACITY = 1 << 20
MakeArena = Callable[[int, int], _C.Arena]


@pytest.fixture(params=[_C.Arena.virtual, _C.Arena.host], ids=["virtual", "host"])
def make(request: pytest.FixtureRequest) -> MakeArena:
    return request.param


@pytest.fixture
def arena(make: MakeArena) -> _C.Arena:
    return make(CAPACITY, 2)


def test_pointers_and_offsets(arena: _C.Arena) -> None:
    first = arena.allocate(100, 0, 0)
    second = arena.allocate(100, 0, 0)
    assert second - first == 128
    assert (arena.offset_of(first), arena.offset_of(second)) == (0, 128)
    assert arena.pointer_to(128) == second
    assert arena.owns(first)
    assert arena.owns(first + CAPACITY - 1)
    assert not arena.owns(first + CAPACITY)
    assert not arena.owns(first - 1)
    assert not arena.owns(0)
    assert arena.find(second).bytes == 128
    assert arena.find(second + 64) is None
    assert arena.find(0) is None


def test_refusals_are_none(arena: _C.Arena) -> None:
    assert arena.allocate(CAPACITY + 1, 0, 0) is None
    arena.set_limit(1, 64)
    assert arena.limit(1) == 64
    assert arena.allocate(65, 0, 1) is None
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert arena.allocate(1, 0, 0) is None
    assert arena.allocate_at(0, 64, 0, 0) is None
    arena.free(pointer, 0)
    assert arena.allocate_at(CAPACITY // 2, 64, 1, 0) is None
    assert arena.allocate(64, 1, 0, may_sync=False) is None
    assert arena.allocate(64, 1, 0) == pointer
    assert arena.statistics().forced_syncs == 1
    assert arena.allocate_at(CAPACITY // 2, 64, 1, 0) == pointer + CAPACITY // 2


def test_strange_pointers_are_refused(arena: _C.Arena) -> None:
    pointer = arena.allocate(64, 0, 0)
    arena.free(pointer, 0)
    for stranger in (0, 12345, pointer, pointer + 1, pointer + CAPACITY):
        with pytest.raises(_C.UnknownChunk):
            arena.free(stranger, 0)
        with pytest.raises(_C.UnknownChunk):
            arena.use(stranger, 0)


def test_statistics(arena: _C.Arena) -> None:
    pointer = arena.allocate(1000, 0, 2)
    arena.allocate(64, 1, 3)
    arena.free(pointer, 0)
    arena.synchronize()
    now = arena.statistics()
    assert (now.capacity, now.live, now.peak, now.extent) == (CAPACITY, 64, 1088, 1088)
    assert (now.free, now.largest_free) == (CAPACITY - 64, CAPACITY - 1088)
    assert (now.allocations, now.forced_syncs, now.explicit_syncs) == (2, 0, 1)
    assert (arena.held(2), arena.peak(2), arena.held(3)) == (0, 1024, 64)
    arena.reset_peaks()
    assert (arena.statistics().peak, arena.peak(2)) == (64, 0)


def test_resize(arena: _C.Arena) -> None:
    pointer = arena.allocate(CAPACITY // 2, 0, 0)
    assert not arena.resize(CAPACITY // 4)
    assert arena.resize(CAPACITY // 2)
    assert not arena.owns(pointer + CAPACITY // 2)
    assert arena.allocate(64, 0, 0) is None
    assert arena.statistics().capacity == CAPACITY // 2


def test_snapshot_and_log(arena: _C.Arena) -> None:
    arena.record(True)
    pointer = arena.allocate(64, 0, 0)
    arena.synchronize()
    arena.use(pointer, 1)
    copy = arena.snapshot()
    copy.free(0, 0)
    copy.check_consistency()
    arena.free(pointer, 0)
    log = arena.take_log()
    assert [_C.EventKind(kind).name for kind in log["kind"]] == ["ALLOC", "SYNC", "USE", "FREE"]
    assert _C.check_happens_before(log, 2) == []


def test_timeline_samples_what_a_job_holds(arena: _C.Arena) -> None:
    first = arena.allocate(64, 0, 1)
    arena.allocate(100, 0, 4)
    arena.free(first, 0)
    seconds, jobs, held = arena.timeline()
    assert jobs.tolist() == [1, 4, 1]
    assert held.tolist() == [64, 128, 0]
    assert np.all(np.diff(seconds) >= 0)
    arena.enable_timeline(False)
    arena.allocate(64, 0, 1)
    assert arena.timeline()[0].size == 3
    arena.clear_timeline()
    assert arena.timeline()[0].size == 0


def test_timeline_is_bounded_and_fair(arena: _C.Arena) -> None:
    arena.allocate(640, 0, 0)
    arena.allocate(640, 0, 1)
    arena.free(arena.allocate(64, 0, 2), 0)  # a job that ends early
    for step in range(100_000):
        if step == 20_000:
            early = arena.timeline()[0][-1]
        for job in (0, 1):
            arena.free(arena.allocate(64, job, job), job)
    seconds, jobs, held = arena.timeline()
    assert 5_000 < seconds.size <= 20_000
    assert np.all(np.diff(seconds) >= 0)
    assert np.bincount(jobs)[:2].min() > 0.25 * jobs.size
    assert seconds[0] < early  # the beginning is still there
    assert held[jobs == 2][-1] == 0


def test_timeline_of_a_job_that_keeps_nothing_is_bounded(arena: _C.Arena) -> None:
    for _ in range(50_000):
        arena.free(arena.allocate(64, 0, 0), 0)
    assert arena.timeline()[0].size <= 20_000


def test_many_threads(arena: _C.Arena) -> None:
    def work(lane: int) -> None:
        for size in range(1, 1000):
            pointer = arena.allocate(size, lane, lane)
            arena.use(pointer, lane)
            arena.free(pointer, lane)

    threads = [threading.Thread(target=work, args=(lane % 2,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.statistics().live == 0
    arena.snapshot().check_consistency()


def test_host_memory_is_memory() -> None:
    arena = _C.Arena.host(CAPACITY + 63, 2)
    assert arena.has_memory()
    assert arena.statistics().capacity == CAPACITY
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert pointer % 4096 == 0
    ctypes.memset(pointer, 7, CAPACITY)
    assert ctypes.string_at(pointer + CAPACITY - 4, 4) == b"\x07" * 4


def test_host_memory_that_does_not_exist() -> None:
    with pytest.raises(_C.BackendError, match="choose a smaller budget"):
        _C.Arena.host(1 << 62, 2)


def test_virtual_memory_of_any_size() -> None:
    arena = _C.Arena.virtual(1 << 50, 2)
    assert not arena.has_memory()
    assert arena.allocate(1 << 49, 0, 0) is not None
