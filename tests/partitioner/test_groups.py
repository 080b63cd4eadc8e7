import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.partitioner import (
    EVENT,
    NodeGroup,
    Profile,
    cut_at,
    num_allocation_groups,
    partition,
    two_groups_at,
    two_groups_at_peak,
)
from waterflow.partitioner.testing import profiles, step_profile, triangle

pytestmark = pytest.mark.virtual


def ranges(groups):
    return [(group.start, group.stop) for group in groups]


def test_groups_close_when_their_bytes_reach_the_split_size():
    profile = step_profile([[4], [4], [6], [2], [-2], [-6], [-4], [-4]])
    groups = partition(profile, 8)
    assert ranges(groups) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [group.net_bytes for group in groups] == [8, 8, -8, -8]
    assert [group.allocates for group in groups] == [True, True, False, False]
    assert num_allocation_groups(groups, profile) == 2


def test_there_is_a_cut_after_the_peak_node():
    profile = step_profile([[4], [4, 1, -1], [-4], [-4]])
    assert ranges(partition(profile, 1000)) == [(0, 2), (2, 4)]


def test_growth_counts_what_comes_and_goes_inside_a_group():
    profile = step_profile([[4], [30, -30], [-4]], seconds=[1, 2, 4])
    assert cut_at(profile, []) == (NodeGroup(0, 3, 0, 34, 7.0),)
    assert cut_at(profile, [2]) == (NodeGroup(0, 2, 4, 34, 3.0), NodeGroup(2, 3, -4, 0, 4.0))


def test_a_bump_before_the_peak_counts_among_the_allocation_groups():
    profile = step_profile([[8], [-8], [9], [-9]])
    groups = partition(profile, 8)
    assert [group.net_bytes for group in groups] == [8, -8, 9, -9]
    assert num_allocation_groups(groups, profile) == 3


def test_cuts():
    profile = triangle(3)
    assert ranges(cut_at(profile, [4, 2, 2, 0, 6])) == [(0, 2), (2, 4), (4, 6)]
    assert ranges(two_groups_at_peak(profile)) == [(0, 3), (3, 6)]
    assert ranges(two_groups_at(profile, 4)) == [(0, 4), (4, 6)]
    assert ranges(two_groups_at(profile, 0)) == [(0, 6)]
    for outside in (-1, 7):
        with pytest.raises(ValueError, match=r"0\.\.6"):
            cut_at(profile, [outside])


@pytest.mark.parametrize("split_size", [0, -5])
def test_split_size_must_be_positive(split_size):
    with pytest.raises(ValueError, match="at least 1 byte"):
        partition(triangle(2), split_size)


def test_a_step_without_events():
    profile = Profile(np.zeros(0, dtype=EVENT), np.zeros(3), 0)
    groups = partition(profile, 8)
    assert groups[-1].stop == 3
    assert num_allocation_groups(groups, profile) == 1


@settings(deadline=None)
@given(profile=profiles(), split_size=st.integers(1, 300))
def test_partition_covers_every_node_once_and_keeps_the_sums(profile, split_size):
    groups = partition(profile, split_size)
    assert groups[0].start == 0
    assert groups[-1].stop == profile.num_nodes
    assert all(a.stop == b.start for a, b in itertools.pairwise(groups))
    assert sum(group.net_bytes for group in groups) == profile.surviving_bytes
    assert sum(group.seconds for group in groups) == pytest.approx(profile.seconds)
    assert profile.peak_node + 1 in {group.stop for group in groups}
    live = high = 0
    for group in groups:
        assert group.stop > group.start
        assert group.growth_bytes >= max(0, group.net_bytes)
        high = max(high, live + group.growth_bytes)
        live += group.net_bytes
    assert high == profile.transient_peak_bytes


@settings(deadline=None)
@given(profile=profiles(), split_size=st.integers(1, 300))
def test_groups_close_no_later_than_at_the_split_size(profile, split_size):
    net = profile.node_net()
    for group in partition(profile, split_size):
        before_last = np.cumsum(net[group.start : group.stop - 1])
        assert (np.abs(before_last) < split_size).all()
