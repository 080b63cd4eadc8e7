"""A step's memory: its events cut into groups, its places when it runs alone."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.flow import UNIT, flowing_profiles, in_units
from waterflow.executor.plan.need import MemoryNeed, fit_in_turn
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.partitioner.groups import NodeGroup
from waterflow.partitioner.testing import step_profile

pytestmark = pytest.mark.virtual


def memory_of(nodes):
    return StepMemory(in_units(step_profile(nodes)), UNIT)


def test_groups_end_where_their_last_node_does():
    memory = memory_of([[1], [2, -2], [], [3], [-3, -1]])
    groups = [NodeGroup(0, 2, 0, 0, 0.0), NodeGroup(2, 3, 0, 0, 0.0), NodeGroup(3, 5, 0, 0, 0.0)]
    sizes, ids, ends = memory.arrays(groups)
    assert ends.tolist() == [3, 3, 6]
    assert (sizes // UNIT).tolist() == [1, 2, -2, 3, -3, -1]
    assert ids.tolist() == [0, 1, 1, 2, 2, 0]
    assert [array.dtype for array in (sizes, ids, ends)] == [np.int64, np.int32, np.int32]


@given(flowing_profiles())
@settings(max_examples=40, deadline=None)
def test_alone_every_block_has_a_place_of_its_own_below_the_extent(profile):
    memory = StepMemory(profile, UNIT)
    assert memory.extent >= profile.transient_peak_bytes
    live, places = {}, iter(memory.solo_offsets.tolist())
    for _, size, name in profile.events.tolist():
        if size < 0:
            del live[name]
            continue
        start = next(places)
        assert start % UNIT == 0
        assert start + size <= memory.extent
        assert all(start >= stop or begin >= start + size for begin, stop in live.values())
        live[name] = start, start + size


def test_a_gap_that_no_block_fits_counts():
    """2 comes when 1 and 3 lie there with 1 free between them: there is no place but above."""
    memory = memory_of([[1], [2], [3], [-2], [4], [-1, -3, -4]])
    assert memory.extent >= 8 * UNIT


def test_what_fits_in_turn_holds_everybodys_tensors_and_the_largest_step():
    needs = [MemoryNeed(100, 50), MemoryNeed(10, 80), MemoryNeed(0, 0)]
    assert fit_in_turn(needs, 190)
    assert not fit_in_turn(needs, 189)
    assert [need.alone_bytes for need in needs] == [150, 90, 0]


def test_the_need_of_a_job_is_that_of_its_largest_step():
    small, large = memory_of([[1], [-1]]), memory_of([[5], [-5]])
    assert MemoryNeed.of(7, [(small, 0), (large, 0)]) == MemoryNeed(7, 5 * UNIT)
    first = MemoryNeed.of(7, [(small, 0), (large, 4 * UNIT)])
    assert first.step_bytes == UNIT, "what a first step makes itself is among what persists"
    assert MemoryNeed.of(7, [(small, 0)], measured_bytes=999).step_bytes == 999
    assert MemoryNeed.of(7, []) == MemoryNeed(7, 0)
