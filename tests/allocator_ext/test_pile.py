"""Piles: no two blocks in one place at a time, and as low as an account of its own says."""

from __future__ import annotations

import bisect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.testing import profiles

pytestmark = pytest.mark.virtual

BUNDLED_ABOVE = 12_288  # blocks

Arrays = tuple[np.ndarray, np.ndarray]  # bytes and block numbers of a step's events


def events_of(profile: Profile) -> Arrays:
    events = profile.events
    return (
        np.ascontiguousarray(events["bytes"], np.int64),
        np.ascontiguousarray(events["id"], np.int32),
    )


def live_bytes(events: Arrays) -> np.ndarray:
    return np.cumsum(events[0])


def live_peak(events: Arrays) -> int:
    return int(live_bytes(events).max(initial=0))


def replay(events: Arrays, offsets: np.ndarray) -> list[int]:
    """Carries a step out: how far it reaches after each event. No two blocks may overlap."""
    alive: list[tuple[int, int]] = []  # (start, end), in address order
    places: list[tuple[int, int]] = []
    reach = []
    following = iter(offsets.tolist())
    for size, name in zip(events[0].tolist(), events[1].tolist(), strict=True):
        if size < 0:
            alive.remove(places[name])
        else:
            start = next(following)
            places.append((start, start + size))
            at = bisect.bisect(alive, places[-1])
            assert at == 0 or alive[at - 1][1] <= start, "two blocks overlap"
            assert at == len(alive) or start + size <= alive[at][0], "two blocks overlap"
            alive.insert(at, places[-1])
        reach.append(alive[-1][1] if alive else 0)
    assert next(following, None) is None, "more places than blocks"
    return reach


def check(events: Arrays, limit: int) -> int:
    """Piles up twice, replays, and returns the extent."""
    pile = _C.pile_up(*events, limit)
    reach = replay(events, pile.offsets)
    assert pile.reach.tolist() == reach
    assert _C.reach_of(*events, pile.offsets.tolist()).tolist() == reach
    assert pile.extent == max(reach, default=0) >= live_peak(events)
    assert _C.pile_up(*events, limit).offsets.tolist() == pile.offsets.tolist(), "two results"
    return int(pile.extent)


def last_to_die_lowest(events: Arrays) -> int:
    """The extent where blocks choose by their ends, each the lowest place free for its life."""
    lives: list[tuple[int, int, int]] = []  # (begin, end, bytes)
    for at, (size, name) in enumerate(zip(events[0].tolist(), events[1].tolist(), strict=True)):
        if size > 0:
            lives.append((at, len(events[0]), size))
        else:
            lives[name] = (lives[name][0], at + 1, lives[name][2])
    placed: list[tuple[int, int, tuple[int, int, int]]] = []
    for life in sorted(lives, key=lambda life: -life[1]):
        begin, end, size = life
        taken = [(a, b) for a, b, other in placed if other[0] < end and begin < other[1]]
        starts = sorted({0, *(b for _, b in taken)})
        free = (s for s in starts if all(b <= s or s + size <= a for a, b in taken))
        start = next(free)
        placed.append((start, start + size, life))
    return max((b for _, b, _ in placed), default=0)


@given(profiles(), st.sampled_from([0.0, 0.01, 0.1, 1.0]))
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_the_limit_is_kept_where_it_can_be(
    profile: Profile, headroom: float
) -> None:
    events = events_of(profile)
    limit = int(live_peak(events) * (1 + headroom))
    extent = check(events, limit)
    simple = last_to_die_lowest(events)
    assert extent <= simple
    if simple <= limit:
        assert extent == simple, "a pile within the limit is to fall as soon as it can"


@given(profiles())
@settings(max_examples=50, deadline=None)
def test_a_limit_that_cannot_be_kept_spoils_nothing(profile: Profile) -> None:
    events = events_of(profile)
    assert check(events, 0) <= last_to_die_lowest(events)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_blocks_that_come_and_go_like_a_stack_leave_no_gap(sizes: list[int], seed: int) -> None:
    """Whatever the limit, the pile is exactly what is alive, at every moment."""
    chance = np.random.default_rng(seed)
    events: list[tuple[int, int]] = []
    stack: list[tuple[int, int]] = []
    for name, size in enumerate(sizes):
        while stack and chance.random() < 0.4:
            events.append((-stack[-1][0], stack.pop()[1]))
        stack.append((size, name))
        events.append((size, name))
    events += [(-size, name) for size, name in reversed(stack)]
    arrays = as_arrays(events)
    assert _C.pile_up(*arrays, live_peak(arrays)).reach.tolist() == live_bytes(arrays).tolist()


def as_arrays(events: list[tuple[int, int]]) -> Arrays:
    return (
        np.array([size for size, _ in events], np.int64),
        np.array([name for _, name in events], np.int32),
    )


def test_squeezing_lowers_a_pile() -> None:
    """5 dies last and 2 next: at the bottom they leave no place for 6, which is there before 5."""
    events = as_arrays([(6, 0), (2, 1), (-6, 0), (5, 2), (-2, 1), (-5, 2)])
    assert check(events, 13) == 13
    assert check(events, 12) == live_peak(events) == 8


def test_a_step_without_blocks() -> None:
    pile = _C.pile_up(*as_arrays([]), 0)
    assert (pile.extent, len(pile.offsets), len(pile.reach)) == (0, 0, 0)


@pytest.mark.parametrize("events", [[(-3, 0)], [(3, 0), (-3, 1)], [(3, 0), (-3, -1)]])
def test_a_free_without_its_allocation_is_refused(events: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"event \d frees block -?\d, which is not there"):
        _C.pile_up(*as_arrays(events), 10)


def test_reach_needs_a_place_per_block() -> None:
    with pytest.raises(ValueError, match="more allocations than places"):
        _C.reach_of(*as_arrays([(3, 0), (4, 1)]), [0])


# Long steps


def unrolled_cells(cells: int, kept: int = 4, passing: int = 3) -> Arrays:
    """A recurrent step: every cell keeps blocks for backward, which takes the cells in reverse."""
    events: list[tuple[int, int]] = []
    names = itertools.count()

    def take(size: int) -> tuple[int, int]:
        events.append((size, next(names)))
        return events[-1]

    def give(blocks: list[tuple[int, int]]) -> None:
        events.extend((-size, name) for size, name in blocks)

    held = []
    for _ in range(cells):
        temporary = [take(256 * 64) for _ in range(passing)]
        held.append([take(64 * 64) for _ in range(kept)])
        give(temporary)
    gradient: list[tuple[int, int]] = []
    for blocks in reversed(held):
        temporary = [take(256 * 64) for _ in range(passing)]
        following = [take(64 * 64)]
        give([*gradient, *temporary, *blocks])
        gradient = following
    give(gradient)
    return as_arrays(events)


def test_long_steps_are_piled_as_tightly() -> None:
    events = unrolled_cells(1200)
    assert int((events[0] > 0).sum()) > BUNDLED_ABOVE
    for headroom in (0.1, 0.0):
        pile = _C.pile_up(*events, int(live_peak(events) * (1 + headroom)))
        assert pile.reach.tolist() == replay(events, pile.offsets)
        assert pile.extent <= (1.01 + headroom) * live_peak(events)


def test_long_steps_whose_blocks_have_nothing_in_common() -> None:
    """No two lives begin and end together: what is bundled must still be done within seconds."""
    chance = np.random.default_rng(3)
    count = BUNDLED_ABOVE + 2000
    begin = chance.random(count)
    end = begin + chance.random(count) * (1 - begin) * chance.choice([0.01, 0.1, 1.0], count)
    sizes = 64 * chance.integers(1, 200, count)
    order = np.argsort(np.concatenate([begin, end]), kind="stable")
    names = np.empty(count, np.int64)  # blocks are numbered as they come
    names[np.argsort(begin, kind="stable")] = np.arange(count)
    events = as_arrays(
        [
            (int(sizes[i]), int(names[i]))
            if i < count
            else (-int(sizes[i - count]), int(names[i - count]))
            for i in order.tolist()
        ]
    )
    pile = _C.pile_up(*events, int(live_peak(events) * 1.5))
    assert pile.reach.tolist() == replay(events, pile.offsets)
    assert pile.extent <= 1.5 * live_peak(events)
