"""The arena's version: another after whatever can make a plan stale, the same when all is as it
was."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

CAPACITY = 1 << 20

Event = Callable[[_C.Arena, int], object]  # with the pointer of a live block of 640 bytes


@pytest.fixture
def arena() -> _C.Arena:
    return _C.Arena.virtual(CAPACITY, 2)


def grown_by_a_request(arena: _C.Arena) -> None:
    arena.set_growth(64)
    assert arena.allocate(CAPACITY, 0, 0) is not None


EVENTS: dict[str, Event] = {
    "a block comes": lambda arena, block: arena.allocate(64, 0, 0),
    "a block comes to a place": lambda arena, block: arena.allocate_at(64 * 100, 64, 0, 0),
    "a block goes": lambda arena, block: arena.free(block, 0),
    "the arena grows": lambda arena, block: arena.resize(2 * CAPACITY),
    "the arena shrinks": lambda arena, block: arena.resize(CAPACITY // 2),
    "a request makes it grow": lambda arena, block: grown_by_a_request(arena),
}


@pytest.mark.virtual
@pytest.mark.parametrize("name", EVENTS)
def test_what_can_make_a_plan_stale_changes_the_version(arena: _C.Arena, name: str) -> None:
    block = arena.allocate(640, 0, 0)
    assert block is not None
    before = arena.version
    EVENTS[name](arena, block)
    assert arena.version != before


@pytest.mark.virtual
def test_what_cannot_does_not(arena: _C.Arena) -> None:
    block = arena.allocate(640, 0, 0)
    before = arena.version
    arena.use(block, 1)
    arena.synchronize()
    arena.record(True)
    arena.set_limit(0, 640)
    assert arena.allocate(64, 0, 0) is None
    assert arena.allocate_at(0, 64, 1, 1) is None
    assert not arena.resize(64)
    arena.reset_peaks()
    assert arena.version == before
    assert arena.snapshot().version() == before


@pytest.mark.virtual
def test_the_same_layout_has_the_same_version(arena: _C.Arena) -> None:
    """Whatever has come and gone in between, whoever's it is, and in whatever order it came."""
    assert arena.version == _C.Arena.virtual(CAPACITY, 1).version
    empty = arena.version
    blocks = [(0, 640), (640, 64), (1024, 128)]
    for offset, size in blocks:
        assert arena.allocate_at(offset, size, 0, 0) is not None
    full = arena.version
    for offset, _ in blocks:
        arena.free(arena.pointer_to(offset), 1)
    arena.synchronize()
    assert arena.version == empty
    for offset, size in reversed(blocks):
        assert arena.allocate_at(offset, size, 1, 7) is not None
    assert arena.version == full


@pytest.mark.virtual
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12), st.randoms())
def test_versions_are_as_different_as_layouts(wishes: list[tuple[int, int]], rng: random.Random):
    """A table of all layouts that an arena has had: one version each, and no two have one."""
    arena = _C.Arena.virtual(64 * 32, 1)
    versions: dict[tuple[tuple[int, int], ...], int] = {}
    for start, units in wishes:
        live = [c for c in arena.snapshot().chunks() if c.state == _C.ChunkState.LIVE]
        if live and rng.random() < 0.4:
            arena.free(arena.pointer_to(rng.choice(live).offset), 0)
        else:
            arena.allocate_at(start * 64, units * 64, 0, 0)
        chunks = arena.snapshot().chunks()
        layout = tuple((c.offset, c.bytes) for c in chunks if c.state == _C.ChunkState.LIVE)
        assert arena.live_end == max((offset + size for offset, size in layout), default=0)
        assert versions.setdefault(layout, arena.version) == arena.version
        arena.snapshot().check_consistency()
    assert len(set(versions.values())) == len(versions)


@pytest.mark.cpu
def test_a_tensor_that_comes_moves_and_goes_changes_the_version() -> None:
    _C.install_lane_allocator()
    arena = _C.Arena.host(CAPACITY, 2)
    _C.register_arena(arena)
    tensor = torch.ones(16)
    empty = arena.version
    _C.move_into_arena(tensor, arena, 3)
    first = arena.version
    assert _C.move_within_arena(tensor, arena, 3, 6400)
    second = arena.version
    assert len({empty, first, second}) == 3
    _C.move_out_of_arena(tensor, arena)
    assert arena.version == empty
    reservation = _C.keep_in_place(tensor, arena, 3)
    assert arena.version == first, "a reservation is a block like any other"
    reservation.move(6400, 3)
    assert arena.version == second
    del reservation
    assert arena.version == empty
    _C.retire_arena(arena)
