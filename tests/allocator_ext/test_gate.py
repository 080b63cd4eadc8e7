"""The gate lets a group in exactly when it fits and both steps can still be finished."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

RANGE = 10
Action = tuple[str, int]  # what, lane


@dataclass(frozen=True)
class Step:
    """How far a step reaches while each group runs, and between them."""

    during: tuple[int, ...]
    after: tuple[int, ...]

    def demand(self) -> _C.Demand:
        return _C.Demand(self.during, self.after)


@st.composite
def steps(draw: st.DrawFn, most_groups: int = 5, tallest: int = RANGE) -> Step:
    levels = st.integers(0, tallest)
    after = [0, *draw(st.lists(levels, max_size=most_groups - 1)), 0]
    during = [draw(st.integers(max(pair), tallest)) for pair in itertools.pairwise(after)]
    return Step(tuple(during), tuple(after))


def triangle(half: int) -> Step:
    """Rises by 1 in each of `half` groups and falls again."""
    after = [*range(half), *range(half, -1, -1)]
    return Step(tuple(map(max, itertools.pairwise(after))), tuple(after))


@dataclass(frozen=True)
class Place:
    """Where a lane is in its step, None between steps."""

    step: Step | None = None
    done: int = 0
    running: bool = False

    @property
    def held(self) -> int:
        if self.step is None:
            return 0
        return self.step.during[self.done] if self.running else self.step.after[self.done]

    @property
    def finished(self) -> bool:
        return self.step is None or self.done == len(self.step.during)

    def entered(self) -> Place:
        return Place(self.step, self.done, True)

    def left(self) -> Place:
        return Place(self.step, self.done + 1, False)


def fits(mine: Place, other: Place) -> bool:
    assert mine.step is not None
    return mine.step.during[mine.done] + other.held <= RANGE


@cache
def both_can_finish(one: Place, other: Place) -> bool:
    """Tries every order of entering and leaving, groups beside each other included."""
    if one.finished and other.finished:
        return True
    for mine, theirs in ((one, other), (other, one)):
        if mine.running:
            moved = mine.left()
        elif not mine.finished and fits(mine, theirs):
            moved = mine.entered()
        else:
            continue
        if both_can_finish(moved, theirs):
            return True
    return False


def may_enter(mine: Place, other: Place) -> bool:
    """The banker's rule."""
    return fits(mine, other) and both_can_finish(mine.entered(), other)


class Account:
    """Carries actions out at a gate, and keeps an account of its own of who is where."""

    def __init__(self, lanes: int = 2) -> None:
        self.gate = _C.Gate(RANGE, lanes)
        self.places = [Place() for _ in range(lanes)]
        self.waiting = [False] * lanes

    def begin(self, lane: int, step: Step) -> bool:
        begun = self.gate.try_begin(lane, step.demand())
        assert begun == (not self.neighbour_waits(lane)), "a lane that waits is overtaken"
        if begun:
            self.places[lane] = Place(step)
        return begun

    def enter(self, lane: int) -> bool:
        entered = self.gate.try_enter(lane)
        self.waiting[lane] = not entered
        if entered:
            self.places[lane] = self.places[lane].entered()
        self.check()
        return entered

    def leave(self, lane: int) -> None:
        self.gate.leave(lane)
        self.places[lane] = self.places[lane].left()
        self.check()

    def end(self, lane: int) -> None:
        self.gate.end(lane)
        self.places[lane] = Place()
        self.waiting[lane] = False

    def neighbour_waits(self, lane: int) -> bool:
        return lane ^ 1 < len(self.places) and self.waiting[lane ^ 1]

    def neighbour(self, lane: int) -> Place:
        return self.places[lane ^ 1] if lane ^ 1 < len(self.places) else Place()

    def check(self) -> None:
        for lane in range(0, len(self.places), 2):
            assert self.places[lane].held + self.neighbour(lane).held <= RANGE


# Admission


def reachable(one: Step, other: Step) -> Iterator[tuple[tuple[Place, Place], list[Action]]]:
    """Every state that two steps can get into through a gate, with actions that lead there."""
    start = (Place(one), Place(other))
    paths: dict[tuple[Place, Place], list[Action]] = {start: []}
    queue = [start]
    for state in queue:
        yield state, paths[state]
        for lane in (0, 1):
            mine = state[lane]
            if mine.finished or not (mine.running or may_enter(mine, state[1 - lane])):
                continue
            moved = mine.left() if mine.running else mine.entered()
            following = (moved, state[1]) if lane == 0 else (state[0], moved)
            if following not in paths:
                paths[following] = [*paths[state], ("leave" if mine.running else "enter", lane)]
                queue.append(following)


def gate_after(one: Step, other: Step, path: list[Action]) -> Account:
    account = Account()
    assert account.begin(0, one)
    assert account.begin(1, other)
    for what, lane in path:
        if what == "leave":
            account.leave(lane)
        else:
            assert account.enter(lane)
    return account


@given(steps(most_groups=4), steps(most_groups=4))
@settings(max_examples=40, deadline=None)
def test_admission_is_the_bankers_rule_in_every_state(one: Step, other: Step) -> None:
    for state, path in reachable(one, other):
        goes_on = [place.running for place in state]
        for lane in (0, 1):
            mine, theirs = state[lane], state[1 - lane]
            if not mine.finished and not mine.running:
                expected = may_enter(mine, theirs)
                assert gate_after(one, other, path).enter(lane) == expected
                goes_on[lane] = expected
        assert any(goes_on) or all(place.finished for place in state), "nobody can go on"


@given(steps(most_groups=4), steps(most_groups=4))
@settings(max_examples=40, deadline=None)
def test_the_most_that_two_reach(one: Step, other: Step) -> None:
    """The states may be entered from any steps before these, so not all are reachable here."""
    held = {
        mine.held + theirs.held
        for mine, theirs in itertools.product(places(one), places(other))
        if mine.held + theirs.held <= RANGE and both_can_finish(mine, theirs)
    }
    assert _C.most_together(one.demand(), other.demand(), RANGE) == max(held)
    seen = [mine.held + theirs.held for (mine, theirs), _ in reachable(one, other)]
    assert max(seen) <= max(held)


def places(step: Step) -> list[Place]:
    """All places of a lane in a step."""
    between = [Place(step, done) for done in range(len(step.after))]
    return between + [place.entered() for place in between if not place.finished]


def test_steps_that_cannot_both_be_finished_do_not_count() -> None:
    """Two that need all there is at their ends are never both halfway."""
    late = Step(during=(4, 10), after=(0, 4, 0)).demand()
    assert _C.most_together(late, late, 13) == 10
    assert _C.most_together(late, late, 14) == 14


def test_two_equal_triangles_follow_each_other_down() -> None:
    """The second may hold what the first has let go of, group by group, and no more."""
    account = Account()
    account.begin(0, triangle(RANGE))
    account.begin(1, triangle(RANGE))
    for _ in range(RANGE):  # up to the top; there is no room for two that rise
        assert account.enter(0)
        account.leave(0)
        assert not account.enter(1)
    for level in range(RANGE, 0, -1):
        assert account.enter(0)
        assert not account.enter(1)
        account.leave(0)
        assert account.places[0].held == level - 1
        assert account.enter(1)
        account.leave(1)


def test_a_group_that_fits_is_kept_out_where_neither_could_finish() -> None:
    climber = Step((4, 10, 4), (0, 4, 4, 0))
    account = Account()
    account.begin(0, climber)
    account.begin(1, climber)
    assert account.enter(0)
    account.leave(0)
    assert not account.enter(1), "4 + 4 of 10 bytes, but then both need 10"


# Whole runs


@dataclass
class Run:
    """Lanes work their steps off in an order of chance."""

    todo: list[list[Step]]
    rng: random.Random
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.account = Account(len(self.todo))

    def run(self) -> None:
        lanes = list(range(len(self.todo)))
        while any(map(self.is_busy, lanes)):
            self.rng.shuffle(lanes)
            assert any(self.act(lane) for lane in lanes if self.is_busy(lane)), "deadlock"

    def is_busy(self, lane: int) -> bool:
        return bool(self.todo[lane]) or self.account.places[lane].step is not None

    def act(self, lane: int) -> bool:
        place = self.account.places[lane]
        if place.step is None:
            return self.begin(lane)
        if not place.finished and self.rng.random() < 0.05:
            self.account.end(lane)  # it has failed, or is given up
        elif place.running:
            self.account.leave(lane)
        elif place.finished:
            self.account.end(lane)
        else:
            return self.account.enter(lane)
        return True

    def begin(self, lane: int) -> bool:
        begun = self.account.begin(lane, self.todo[lane][0])
        if begun:
            self.todo[lane].pop(0)
        return begun


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_run_ends_and_stays_within_the_range(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 4))
    todo = [data.draw(st.lists(steps(), max_size=4)) for _ in range(lanes)]
    Run(todo, random.Random(data.draw(st.integers(0, 1 << 32)))).run()


def test_who_waits_goes_before_the_neighbours_next_step() -> None:
    account = Account()
    account.begin(0, Step((10, 10), (0, 10, 0)))
    assert account.enter(0)
    account.begin(1, triangle(1))
    assert not account.enter(1)
    account.leave(0)
    assert account.enter(0), "its own step it may finish"
    account.leave(0)
    account.end(0)
    assert not account.begin(0, triangle(1))
    assert account.enter(1)
    assert account.begin(0, triangle(1))


def test_waits_are_counted_once_each() -> None:
    account = Account()
    account.begin(0, triangle(RANGE))
    account.begin(1, triangle(RANGE))
    for _ in range(RANGE):
        account.enter(0)
        account.leave(0)
    assert account.gate.waits == 0
    for _ in range(3):
        assert not account.enter(1)
    assert account.gate.waits == 1
    account.end(0)
    assert account.enter(1)
    assert account.gate.waits == 1


@pytest.mark.parametrize("running", [False, True])
def test_a_step_that_fails_frees_its_memory(running: bool) -> None:
    account = Account()
    account.begin(0, Step((9, 9), (0, 9, 0)))
    account.begin(1, triangle(2))
    account.enter(0)
    if not running:
        account.leave(0)
    assert account.enter(1)
    account.leave(1)
    assert not account.enter(1)
    account.end(0)
    assert account.enter(1)


@pytest.mark.parametrize("lanes", [3, 4])
def test_each_two_lanes_have_a_range_of_their_own(lanes: int) -> None:
    account = Account(lanes)
    full = Step((RANGE,), (0, 0))
    for lane in range(lanes):
        account.begin(lane, full)
    assert account.enter(0)
    assert not account.enter(1)
    assert account.enter(2)
    if lanes == 4:
        assert not account.enter(3)
    account.leave(0)
    account.end(0)
    assert account.enter(1)
    assert account.places[2].running


# Bad input


def test_a_step_too_tall_is_refused() -> None:
    gate = _C.Gate(RANGE, 2)
    with pytest.raises(ValueError, match="needs 11 bytes does not fit a range of 10"):
        gate.try_begin(0, _C.Demand([11], [0, 0]))
    assert gate.try_begin(0, _C.Demand([10], [0, 0]))


@pytest.mark.parametrize(
    ("during", "after", "message"),
    [
        ([], [0], "0 groups"),
        ([3], [0], "one more border than groups, got 1"),
        ([3, 3], [0, 1, 1, 0], "2 groups needs one more border than groups, got 4"),
        ([3], [1, 0], "begin and end without blocks"),
        ([3, 3], [0, 1, 2], "begin and end without blocks"),
        ([3, 3], [0, 4, 0], "group 0 begins or ends with more than it ever holds"),
        ([4, 3], [0, 4, 0], "group 1 begins or ends with more than it ever holds"),
    ],
)
def test_bad_demands_are_refused(during: list[int], after: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.Demand(during, after)


def test_a_demand_tells_what_it_is() -> None:
    demand = _C.Demand([4, 9, 2], [0, 4, 2, 0])
    assert (demand.during, demand.after) == ([4, 9, 2], [0, 4, 2, 0])
    assert (demand.most, len(demand)) == (9, 3)


OUT_OF_TURN: dict[str, tuple[list[Action], Action]] = {
    "enter before begin": ([], ("enter", 0)),
    "leave before begin": ([], ("leave", 0)),
    "leave before enter": ([("begin", 0)], ("leave", 0)),
    "enter twice": ([("begin", 0), ("enter", 0)], ("enter", 0)),
    "leave twice": ([("begin", 0), ("enter", 0), ("leave", 0)], ("leave", 0)),
    "enter after the last": ([("begin", 0), ("enter", 0), ("leave", 0)], ("enter", 0)),
    "begin twice": ([("begin", 0)], ("begin", 0)),
    "enter after the end": ([("begin", 0), ("end", 0)], ("enter", 0)),
}


@pytest.mark.parametrize("case", OUT_OF_TURN)
def test_calls_out_of_turn_are_refused(case: str) -> None:
    before, last = OUT_OF_TURN[case]
    gate = _C.Gate(RANGE, 2)
    demand = _C.Demand([3], [0, 0])
    calls: dict[str, Callable[[int], object]] = {
        "begin": lambda lane: gate.try_begin(lane, demand),
        "enter": gate.try_enter,
        "leave": gate.leave,
        "end": gate.end,
    }
    for what, lane in before:
        calls[what](lane)
    with pytest.raises(RuntimeError, match=f"lane {last[1]} "):
        calls[last[0]](last[1])


def test_lanes_that_do_not_exist_are_refused() -> None:
    gate = _C.Gate(RANGE, 2)
    with pytest.raises(IndexError):
        gate.try_begin(2, _C.Demand([3], [0, 0]))
    with pytest.raises(IndexError):
        gate.try_enter(-1)
