"""A step piled up: how far it reaches when, and its places from both ends of a range."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.flow import AMPLE, UNIT, flowing_profiles, in_units
from waterflow.executor.plan.piled_step import pile_step
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.testing import step_profile, triangle

pytestmark = pytest.mark.virtual


def levels_of(memory: StepMemory, offsets: np.ndarray) -> list[tuple[int, int]]:
    """Per event its node and how far the live blocks reach after it."""
    alive: dict[int, int] = {}
    following = iter(offsets.tolist())
    levels = []
    for node, size, name in memory.profile.events.tolist():
        if size > 0:
            alive[name] = next(following) + size
        else:
            del alive[name]
        levels.append((node, max(alive.values(), default=0)))
    return levels


@given(flowing_profiles(), st.sampled_from([0.0, 0.1]))
@settings(max_examples=60, deadline=None)
def test_a_piled_step_tells_how_far_it_reaches(profile: Profile, headroom: float) -> None:
    memory = StepMemory(profile, UNIT)
    piled = pile_step(memory, headroom, AMPLE)
    assert [group.start for group in piled.groups[1:]] == [g.stop for g in piled.groups[:-1]]
    assert (piled.groups[0].start, piled.groups[-1].stop) == (0, profile.num_nodes)
    levels = levels_of(memory, piled.offsets)
    before = 0
    for group, during, after in zip(
        piled.groups, piled.demand.during, piled.demand.after[1:], strict=True
    ):
        inside = [level for node, level in levels if group.start <= node < group.stop]
        assert during == max([before, *inside])
        before = inside[-1] if inside else before
        assert after == before
    assert piled.extent == max(level for _, level in levels)
    assert piled.sizes.tolist() == [size for size in profile.events["bytes"].tolist() if size > 0]
    if headroom == 0.0:
        assert profile.transient_peak_bytes <= piled.extent <= memory.extent


@given(flowing_profiles(), st.integers(0, 50), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_places_from_the_top_mirror_those_from_the_bottom(
    profile: Profile, start: int, spare: int
) -> None:
    piled = pile_step(StepMemory(profile, UNIT), 0.1, AMPLE)
    start, stop = start * UNIT, start * UNIT + piled.extent + spare * UNIT
    bottom = piled.places(start, stop, from_top=False)
    top = piled.places(start, stop, from_top=True)
    assert (bottom - start).tolist() == (stop - (top + piled.sizes)).tolist()
    for places in (bottom, top):
        assert places.min() >= start
        assert (places + piled.sizes).max() <= stop
        assert not (places % UNIT).any()


def test_a_pile_keeps_to_the_room_there_is() -> None:
    """5 dies last and 2 next: at the bottom they leave no place for 6, which is there before 5."""
    memory = StepMemory(in_units(step_profile([[6], [2], [-6], [5], [-2], [-5]])), UNIT)
    assert pile_step(memory, 1.0, AMPLE).extent == 13 * UNIT
    for headroom, room in ((1.0, 8 * UNIT), (0.0, AMPLE)):
        assert pile_step(memory, headroom, room).extent == 8 * UNIT


def test_blocks_that_outlive_a_step_are_refused() -> None:
    memory = StepMemory(step_profile([[64], [128], [-128]], name="first"), UNIT)
    with pytest.raises(ValueError, match="'first': blocks that outlive it"):
        pile_step(memory, 0.0, AMPLE)


def test_groups_of_a_step_are_fine_enough_to_take_turns() -> None:
    """A rise and fall of 1 second a node: two lanes meet at every node, not once a step."""
    piled = pile_step(StepMemory(in_units(triangle(40)), UNIT), 0.0, AMPLE)
    assert len(piled.groups) == 80
    changes = [b - a for a, b in itertools.pairwise(piled.demand.after)]
    assert changes == [UNIT] * 40 + [-UNIT] * 40
