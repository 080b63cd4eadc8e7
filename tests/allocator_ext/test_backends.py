"""What every backend of an arena keeps to, whatever its memory is.

`allocator_ext/core/arena/backend.h` says what an arena asks of a backend. Here the same tests run
on each one: the host's mapping, mere addresses, and CUDA's virtual memory on the stand-in driver. A
new backend becomes an entry of `BACKENDS` and of the lists below it. What is special about one is
tested where it is: the host's and the virtual one in test_arena.py, CUDA's in
tests/fakecuda/test_device.py.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import FakeDriver, library
from tests.support.tasks import folder
from waterflow.allocator_ext import _C

MIB = 1 << 20
PIECE = 64 * MIB  # the most that a backend holds above what lives
TOTAL = 1 << 30  # of the device
CAPACITY = 3 * PIECE


@dataclass
class Backend:
    """A kind of memory, and what the tests must know of it.

    Attributes:
        make: an arena of so many bytes for two lanes; its memory may wait for `commit`.
        is_held: whether the system has given the range of addresses at a pointer.
        too_much: a capacity that it must refuse, 0 where there is none.
        fail: makes the next call for more of the system's memory fail.
        has_memory: whether one can write to it.
    """

    make: Callable[[int], _C.Arena]
    is_held: Callable[[int, int], bool]
    too_much: int = 0
    fail: Callable[[], None] = lambda: None
    has_memory: bool = True


def is_mapped(pointer: int, size: int) -> bool:
    """Whether all of the range is part of this process's mappings."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    borders = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return size == sum(
        max(0, min(stop, pointer + size) - max(start, pointer)) for start, stop in borders
    )


def host() -> Iterator[Backend]:
    yield Backend(lambda capacity: _C.Arena.host(capacity, 2), is_mapped, too_much=1 << 60)


def virtual() -> Iterator[Backend]:
    def make(capacity: int) -> _C.Arena:
        return _C.Arena.virtual(capacity, 2)

    yield Backend(make, lambda pointer, size: False, has_memory=False)


@functools.cache
def fake_driver() -> FakeDriver:
    """A driver of these tests' own: a copy of the library is another one."""
    return FakeDriver(Path(shutil.copy(library(), folder() / "libbackends.so")))


def cuda() -> Iterator[Backend]:
    driver = fake_driver()
    driver.memory(TOTAL)
    streams = _C.LaneStreams(_C.CudaDevice(str(driver.path), 0), 2)

    def make(capacity: int) -> _C.Arena:
        return _C.Arena.cuda(streams, capacity, host_tensors=True)

    def is_held(pointer: int, size: int) -> bool:
        return any(driver.live(kind) for kind in ("reservations", "handles", "memory_bytes"))

    yield Backend(make, is_held, TOTAL + PIECE, lambda: driver.fail("cuMemCreate", 1, 2))
    driver.reset()


BACKENDS: dict[str, Callable[[], Iterator[Backend]]] = {
    "host": host,
    "virtual": virtual,
    "cuda": cuda,
}
HOST = pytest.param("host", marks=pytest.mark.virtual)
VIRTUAL = pytest.param("virtual", marks=pytest.mark.virtual)
CUDA = pytest.param("cuda", marks=pytest.mark.fakecuda)

#: Marks of tests that have no meaning for all of them.
with_memory = pytest.mark.parametrize("backend", [HOST, CUDA], indirect=True)
with_a_system_that_fails = pytest.mark.parametrize("backend", [CUDA], indirect=True)


@pytest.fixture(params=[HOST, VIRTUAL, CUDA])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from BACKENDS[request.param]()
    request.node.funcargs.clear()  # pytest would keep what other fixtures have made


@pytest.fixture
def arena(backend: Backend) -> _C.Arena:
    arena = backend.make(CAPACITY)
    arena.commit()
    return arena


def memory(pointer: int, size: int) -> Any:
    """Of the stand-in device, too: its memory is the host's."""
    return (ctypes.c_ubyte * size).from_address(pointer)


def fill(backend: Backend, pointer: int, size: int, value: int) -> None:
    """Every byte that the tests will look at again: the first and the last ones."""
    if backend.has_memory:
        for start in (pointer, pointer + size - 8):
            memory(start, 8)[:] = bytes([value] * 8)


def expect_filled(backend: Backend, pointer: int, size: int, value: int) -> None:
    if backend.has_memory:
        for start in (pointer, pointer + size - 8):
            assert bytes(memory(start, 8)) == bytes([value] * 8)


# Addresses


def test_one_range_of_exactly_the_capacity(backend: Backend, arena: _C.Arena) -> None:
    assert arena.has_memory() == backend.has_memory
    assert arena.statistics().capacity == CAPACITY
    base = arena.pointer_to(0)
    assert base != 0
    assert arena.owns(base)
    assert arena.owns(base + CAPACITY - 1)
    assert not arena.owns(base - 1)
    assert not arena.owns(base + CAPACITY)
    assert arena.pointer_to(CAPACITY) == base + CAPACITY


def test_pointers_are_as_aligned_as_offsets(arena: _C.Arena) -> None:
    assert arena.alignment & (arena.alignment - 1) == 0
    assert arena.pointer_to(0) % 4096 == 0, "a page at least"
    for size in (1, arena.alignment, arena.alignment + 1, 12345):
        pointer = arena.allocate(size, 0, 0)
        assert pointer is not None
        assert pointer % arena.alignment == 0


@with_memory
def test_arenas_lie_apart(backend: Backend, arena: _C.Arena) -> None:
    other = backend.make(MIB)
    assert not other.owns(arena.pointer_to(0))
    assert not arena.owns(other.pointer_to(0))
    assert not arena.owns(other.pointer_to(MIB - 1))


# Memory


def test_all_of_it_can_be_written(backend: Backend, arena: _C.Arena) -> None:
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert pointer == arena.pointer_to(0)
    for start in range(0, CAPACITY, PIECE // 2):
        fill(backend, pointer + start, PIECE // 2, 1 + start // (PIECE // 2))
    for start in range(0, CAPACITY, PIECE // 2):
        expect_filled(backend, pointer + start, PIECE // 2, 1 + start // (PIECE // 2))


def test_a_second_commit_changes_nothing(backend: Backend, arena: _C.Arena) -> None:
    pointer = arena.allocate(1000, 0, 0)
    assert pointer is not None
    fill(backend, pointer, 1000, 7)
    before = arena.statistics().taken, arena.pointer_to(0)
    arena.commit()
    assert (arena.statistics().taken, arena.pointer_to(0)) == before
    expect_filled(backend, pointer, 1000, 7)


def test_what_is_taken_covers_the_capacity(arena: _C.Arena) -> None:
    assert CAPACITY <= arena.statistics().taken <= CAPACITY + PIECE


@with_memory
@pytest.mark.parametrize("size", [8, 4096, MIB])
def test_bytes_move_into_within_and_out_of_the_arena(arena: _C.Arena, size: int) -> None:
    _C.install_lane_allocator()
    _C.register_arena(arena)
    try:
        content = torch.randint(256, (size,), dtype=torch.uint8)
        tensor = content.clone()
        _C.move_into_arena(tensor, arena, 0)
        assert arena.owns(tensor.data_ptr())
        assert torch.equal(tensor, content)
        assert _C.move_within_arena(tensor, arena, 0, CAPACITY // 2)
        assert tensor.data_ptr() == arena.pointer_to(CAPACITY // 2)
        assert torch.equal(tensor, content)
        _C.move_out_of_arena(tensor, arena)
        assert not arena.owns(tensor.data_ptr())
        assert torch.equal(tensor, content)
        assert arena.statistics().live == 0
    finally:
        _C.retire_arena(arena)


# Growing, shrinking, giving back


@pytest.mark.parametrize("factor", [0.5, 1.5, 1.0])
def test_resizing_keeps_the_base_and_the_content(
    backend: Backend, arena: _C.Arena, factor: float
) -> None:
    """It may fail to grow, as other memory may lie above; then nothing has changed."""
    pointer = arena.allocate(PIECE, 0, 0)
    assert pointer is not None
    fill(backend, pointer, PIECE, 5)
    wanted = int(CAPACITY * factor)
    done = arena.resize(wanted)
    assert done or factor > 1
    capacity = wanted if done else CAPACITY
    assert arena.statistics().capacity == capacity
    assert capacity <= arena.statistics().taken <= capacity + PIECE
    assert arena.pointer_to(0) == pointer
    assert not arena.owns(pointer + capacity)
    expect_filled(backend, pointer, PIECE, 5)
    rest = arena.allocate(capacity - PIECE, 0, 0)
    assert rest is not None
    fill(backend, rest, capacity - PIECE, 6)
    assert arena.allocate(1, 0, 0) is None


def test_what_lives_is_never_cut_off(backend: Backend, arena: _C.Arena) -> None:
    pointer = arena.allocate_at(2 * PIECE, 4096, 0, 0)
    assert pointer is not None
    fill(backend, pointer, 4096, 9)
    assert not arena.resize(PIECE)
    assert arena.statistics().capacity == CAPACITY
    assert arena.resize(2 * PIECE + 4096)
    expect_filled(backend, pointer, 4096, 9)


@with_memory
def test_more_than_there_is_is_refused(backend: Backend, arena: _C.Arena) -> None:
    before = arena.statistics()
    assert not arena.resize(backend.too_much)
    after = arena.statistics()
    assert (after.capacity, after.taken) == (before.capacity, before.taken)
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert pointer is not None
    fill(backend, pointer, CAPACITY, 3)


@pytest.mark.virtual
def test_addresses_have_no_end() -> None:
    assert _C.Arena.virtual(MIB, 2).resize(1 << 60)


@with_memory
def test_an_arena_of_more_than_there_is_says_what_to_do(backend: Backend) -> None:
    with pytest.raises(_C.BackendError, match="choose a smaller budget"):
        backend.make(backend.too_much).commit()
    arena = backend.make(MIB)
    arena.commit()
    fill(backend, arena.pointer_to(0), MIB, 1)


@with_a_system_that_fails
def test_memory_that_fails_to_come_can_be_asked_for_again(backend: Backend) -> None:
    arena = backend.make(CAPACITY)
    backend.fail()
    with pytest.raises(_C.BackendError):
        arena.commit()
    assert arena.statistics().taken == 0
    arena.commit()
    fill(backend, arena.pointer_to(0), CAPACITY, 1)


@with_a_system_that_fails
def test_a_growth_that_fails_changes_nothing(backend: Backend, arena: _C.Arena) -> None:
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert pointer is not None
    fill(backend, pointer, CAPACITY, 4)
    before = arena.statistics()
    backend.fail()
    assert not arena.resize(CAPACITY + PIECE)
    after = arena.statistics()
    assert (after.capacity, after.taken) == (before.capacity, before.taken)
    expect_filled(backend, pointer, CAPACITY, 4)
    assert arena.resize(CAPACITY + PIECE), "the next one is served"


def test_requests_make_an_arena_grow_only_where_it_may(backend: Backend) -> None:
    arena = backend.make(MIB)
    arena.commit()
    assert arena.allocate(2 * MIB, 0, 0) is None
    arena.set_growth(MIB)
    pointer = arena.allocate(2 * MIB, 0, 0)
    if pointer is None:  # other memory lies above
        assert arena.statistics().capacity == MIB
        return
    fill(backend, pointer, 2 * MIB, 2)
    assert arena.statistics().capacity == 3 * MIB


def test_memory_above_what_lives_is_given_back(backend: Backend, arena: _C.Arena) -> None:
    low, high = arena.allocate(1000, 0, 0), arena.allocate(2 * PIECE, 0, 0)
    assert low is not None
    assert high is not None
    fill(backend, low, 1000, 8)
    fill(backend, high, 2 * PIECE, 1)
    arena.free(high, 0)
    arena.give_back()
    expect_filled(backend, low, 1000, 8)
    assert arena.statistics().capacity == CAPACITY, "the addresses stay"
    assert arena.owns(arena.pointer_to(CAPACITY - 1))
    arena.commit()
    again = arena.allocate(2 * PIECE, 0, 0)
    assert again == high
    fill(backend, high, 2 * PIECE, 2)
    expect_filled(backend, low, 1000, 8)


@with_memory
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_all_is_released_with_the_arena(backend: Backend, share: float) -> None:
    arena = backend.make(CAPACITY)
    arena.commit()
    base, capacity = arena.pointer_to(0), int(CAPACITY * share)
    assert arena.resize(capacity)
    assert backend.is_held(base, capacity)
    del arena
    assert not backend.is_held(base, capacity)


# The lanes


def test_a_request_of_another_lane_waits_for_the_lanes(backend: Backend, arena: _C.Arena) -> None:
    pointer = arena.allocate(CAPACITY, 0, 0)
    assert pointer is not None
    arena.free(pointer, 0)
    assert arena.allocate(64, 1, 0, may_sync=False) is None
    assert arena.allocate(64, 1, 0) == pointer
    assert arena.statistics().forced_syncs == 1
    fill(backend, pointer, 64, 1)


def test_waits_return(arena: _C.Arena) -> None:
    """Where nothing is queued, and as often as they are asked for."""
    for _ in range(3):
        arena.synchronize()
        arena.finish()
    assert arena.statistics().explicit_syncs == 3
