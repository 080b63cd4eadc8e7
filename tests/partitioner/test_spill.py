"""Spill plans against an oracle that replays them: the limit holds, nothing is used while away."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.partitioner import EVENT, Profile
from waterflow.partitioner.spill import (
    CopyCost,
    LimitTooSmallError,
    MovableValue,
    SpillPlan,
    plan_spill,
    smallest_limit,
    spill_everything,
)
from waterflow.partitioner.spilled import End, Node, homes_of, sequence_of, spilled_profile

pytestmark = pytest.mark.virtual


@dataclass
class Step:
    """A step told by its values: uses in order, the first of a transient one makes it."""

    nodes: int
    transient: list[tuple[int, list[int], set[int]]]  # bytes, uses, writes
    persistent: list[tuple[int, list[int], set[int]]]
    temporary: list[int]  # per node
    fixed: int = 0  # persistent bytes that cannot move
    seconds: list[float] = field(default_factory=list)

    @property
    def profile(self) -> Profile:
        rows: list[tuple[int, int, int]] = []
        count = 0
        blocks: dict[int, int] = {}
        for node in range(self.nodes):
            for number, (size, uses, _) in enumerate(self.transient):
                if uses[0] == node:
                    blocks[number] = count
                    rows.append((node, size, count))
                    count += 1
            if self.temporary[node]:
                rows += [(node, self.temporary[node], count), (node, -self.temporary[node], count)]
                count += 1
            for number, (size, uses, _) in enumerate(self.transient):
                if uses[-1] == node:
                    rows.append((node, -size, blocks[number]))
        held = self.fixed + sum(size for size, _, _ in self.persistent)
        seconds = np.array(self.seconds or [0.0] * self.nodes)
        return Profile(np.array(rows, dtype=EVENT), seconds, held)

    @property
    def values(self) -> list[MovableValue]:
        profile = self.profile
        allocated = [e for e in profile.events if e["bytes"] > 0]
        found, taken = [], set()
        for size, uses, writes in self.transient:
            block = next(
                int(e["id"])
                for e in allocated
                if e["node"] == uses[0] and e["bytes"] == size and int(e["id"]) not in taken
            )
            taken.add(block)
            found.append(MovableValue(size, tuple(uses), frozenset(writes), block))
        return found + [
            MovableValue(size, tuple(uses), frozenset(writes), None)
            for size, uses, writes in self.persistent
        ]

    def least(self) -> int:
        """What no plan can do without: at each node what it uses, takes for itself, and cannot
        move."""
        most = 0
        for node in range(self.nodes):
            held = self.fixed + self.temporary[node]
            held += sum(s for s, uses, _ in self.transient if node in uses)
            held += sum(s for s, uses, _ in self.persistent if node in uses)
            most = max(most, held)
        return most


def replay(step: Step, plan: SpillPlan) -> int:
    """The most bytes that are held under a plan.

    Raises AssertionError where a node uses what is away, or comes back with other bytes than it
    left with, or writes to what is being copied.
    """
    values = step.values
    here = {n for n, value in enumerate(values) if value.is_persistent and n not in plan.away}
    blocks = set(here)
    version = [0] * len(values)
    home = [0 if value.is_persistent else -1 for value in values]
    leaving: set[int] = set()
    most = held = step.fixed + sum(values[n].size for n in here)
    for item in sequence_of(plan, step.nodes):
        if isinstance(item, Node):
            node = item.number
            for number, value in enumerate(values):
                if not value.is_persistent and value.uses[0] == node:
                    here.add(number)
                    blocks.add(number)
                    held += value.size
            most = max(most, held + step.temporary[node])
            for number, value in enumerate(values):
                if node in value.uses:
                    assert number in here, f"node {node} uses {number}, which is away"
                if node in value.writes:
                    assert number not in leaving, f"node {node} writes {number} while it is copied"
                    version[number] += 1
                if not value.is_persistent and value.uses[-1] == node:
                    here.remove(number)
                    blocks.remove(number)
                    held -= value.size
            continue
        number = item.absence.value
        if item.end is End.LEAVE:
            assert number in here
            leaving.add(number)
            if item.absence.copies:
                home[number] = version[number]
        elif item.end is End.GONE:
            assert home[number] == version[number], f"{number} leaves, and its home is stale"
            leaving.discard(number)
            here.remove(number)
            blocks.remove(number)
            held -= values[number].size
        elif item.end is End.FETCH:
            assert number not in blocks
            blocks.add(number)
            held += values[number].size
            most = max(most, held)
        else:
            assert number in blocks
            assert home[number] == version[number]
            here.add(number)
    for number, value in enumerate(values):
        if value.is_persistent:
            assert (number in here) == (number not in plan.away), "as it was before the step"
            assert home[number] == version[number] or number in here
    return most


@st.composite
def uses_of(draw: st.DrawFn, nodes: int) -> tuple[int, list[int], set[int]]:
    uses = sorted(draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=4)))
    return draw(st.integers(1, 50)), uses, draw(st.sets(st.sampled_from(uses)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    nodes = draw(st.integers(1, 12))
    transient = draw(st.lists(uses_of(nodes), max_size=8))
    persistent = draw(st.lists(uses_of(nodes), max_size=5))
    temporary = draw(st.lists(st.integers(0, 20), min_size=nodes, max_size=nodes))
    made = [(size, uses, writes | {uses[0]}) for size, uses, writes in transient]
    seconds = draw(st.sampled_from([[], np.resize([1e-6, 1e-3, 1e-2], nodes).tolist()]))
    return Step(nodes, made, persistent, temporary, draw(st.integers(0, 20)), seconds)


COSTS = st.sampled_from([CopyCost(), CopyCost(1e3, 2e3), CopyCost(1e9, 1e9, 1e-4)])


@settings(max_examples=300, deadline=None)
@given(steps(), COSTS, st.floats(0, 1))
def test_a_plan_keeps_to_its_limit(step, cost, share):
    profile, values = step.profile, step.values
    least, most = step.least(), profile.solo_peak_bytes
    assert smallest_limit(profile, values) == least
    limit = least + round(share * (most - least))
    plan = plan_spill(profile, values, limit, cost=cost)
    assert replay(step, plan) == plan.peak <= limit
    if limit >= most:
        assert plan.absences == ()


@settings(max_examples=100, deadline=None)
@given(steps())
def test_less_than_an_operator_works_on_is_refused(step):
    least = step.least()
    with pytest.raises(LimitTooSmallError, match=f"{least} bytes or more") as told:
        plan_spill(step.profile, step.values, least - 1)
    assert told.value.smallest == least
    plan_spill(step.profile, step.values, told.value.smallest)


@settings(max_examples=200, deadline=None)
@given(steps(), st.floats(0, 1))
def test_the_profile_is_that_of_the_replay(step, share):
    profile, values = step.profile, step.values
    least, most = step.least(), profile.solo_peak_bytes
    plan = plan_spill(profile, values, least + round(share * (most - least)))
    sequence = sequence_of(plan, step.nodes)
    spilled = spilled_profile(profile, values, sequence)
    stay = profile.persistent_bytes - sum(values[number].size for number in plan.away)
    assert stay + spilled.transient_peak_bytes == max(replay(step, plan), stay)
    assert spilled.surviving_bytes == profile.surviving_bytes == 0
    assert spilled.num_nodes == len(sequence)
    homes, order = homes_of(values, sequence).profile(len(sequence))
    moving = {one.value for one in plan.absences if not values[one.value].is_persistent}
    assert set(order) == moving
    assert (homes is None) == (not moving)


@settings(max_examples=100, deadline=None)
@given(steps(), st.data())
def test_what_has_to_be_away_is(step, data):
    numbers = [n for n, value in enumerate(step.values) if value.is_persistent]
    required = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
    plan = plan_spill(step.profile, step.values, step.profile.solo_peak_bytes, required=required)
    assert plan.away >= required
    replay(step, plan)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_everything_away_needs_least(step):
    assert replay(step, spill_everything(step.profile, step.values)) == step.least()


def test_a_step_by_hand():
    """A large value is made, another peak passes without it, and it is read again."""
    step = Step(
        nodes=5,
        transient=[(100, [0, 4], {0}), (10, [1, 3], {1})],
        persistent=[(30, [4], {4}), (5, [0, 1, 2, 3, 4], set())],
        temporary=[0, 0, 80, 0, 0],
        seconds=[1e-3] * 5,
    )
    assert step.profile.solo_peak_bytes == 225
    plan = plan_spill(step.profile, step.values, 150)
    assert [(one.value, one.copies) for one in plan.absences] == [(0, True)]
    (one,) = plan.absences
    assert (one.leave, one.back) == (1, 4)
    assert one.gone <= 2 < one.fetch  # beside the copies, and before the peak
    step.temporary[2] = 140  # now only what every node uses may stay
    tighter = plan_spill(step.profile, step.values, 150)
    assert tighter.away == {2}
    assert {one.value for one in tighter.absences} == {0, 1, 2}
    assert [one.copies for one in tighter.absences if one.value == 2] == [False, True]


def test_a_value_that_was_not_written_leaves_without_a_copy():
    step = Step(
        nodes=7,
        transient=[(100, [0, 3, 6], {0})],
        persistent=[],
        temporary=[0, 100, 0, 0, 0, 100, 0],
    )
    plan = plan_spill(step.profile, step.values, 100)
    assert [one.copies for one in plan.absences] == [True, False]
