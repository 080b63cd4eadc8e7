"""Every offset gives an order that barriers can honour; where Algorithm 1 is right, it is kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.partitioner import GroupRef, partition
from waterflow.partitioner.policies.arrangement import (
    GroupTable,
    algorithm_1,
    deal_lanes,
    interleaved,
    staggered,
)
from waterflow.partitioner.testing import plan_jobs, step_profile, triangle

pytestmark = pytest.mark.virtual


def table_of(*profiles, split_size=1):
    groups = [partition(profile, split_size) for profile in profiles]
    return GroupTable.of(groups, profiles, [profile.node_seconds for profile in profiles])


def places(table, index):
    return [index[table.rows(job)].tolist() for job in range(table.num_jobs)]


@settings(deadline=None, max_examples=150)
@given(
    jobs=plan_jobs(),
    split=st.integers(1, 200),
    lanes=st.integers(2, 4),
    offset=st.integers(-40, 40),
)
def test_indices_grow_strictly_and_lanes_suffice(jobs, split, lanes, offset):
    table = table_of(*(job.profile for job in jobs), split_size=split)
    order = table.by_group_bytes()
    for arranged, limit in (
        (algorithm_1(table, order, offset), 2),
        (staggered(table, order, abs(offset), lanes), lanes),
        (interleaved(table, order, lanes, lanes + abs(offset)), lanes),
    ):
        assert all((np.diff(own) > 0).all() for own in places(table, arranged))
        assert np.bincount(arranged).max() <= limit
        pairs = deal_lanes(table, arranged, limit)
        assert sum(ref is not None for pair in pairs for ref in pair) == table.first[-1]


@settings(deadline=None)
@given(jobs=plan_jobs(), split=st.integers(1, 200))
def test_the_latest_start_is_one_after_another(jobs, split):
    table = table_of(*(job.profile for job in jobs), split_size=split)
    order = table.by_group_bytes()
    expected = np.concatenate([np.arange(table.count(job)) for job in range(table.num_jobs)])
    start = 0
    for job in order:
        expected[table.rows(job)] += start
        start += table.count(job)
    assert algorithm_1(table, order, -table.longest).tolist() == expected.tolist()
    assert staggered(table, order, table.longest, 2).tolist() == expected.tolist()


def test_figure_5_of_waterwave():
    # Six, four and four groups, the first half allocating: J1NG4 runs beside J2NG1, and J2NG3
    # beside J3NG2.
    table = table_of(triangle(3), triangle(2), triangle(2))
    index = algorithm_1(table, [0, 1, 2], 0)
    assert places(table, index) == [[0, 1, 2, 3, 4, 5], [3, 4, 6, 7], [5, 6, 7, 8]]
    pairs = deal_lanes(table, index, 2)
    assert set(pairs[3]) == {GroupRef(0, 3), GroupRef(1, 0)}
    assert set(pairs[6]) == {GroupRef(1, 2), GroupRef(2, 1)}


def test_p_groups_of_the_second_job_run_beside_the_first_jobs_last():
    table = table_of(triangle(4), triangle(3))
    assert places(table, algorithm_1(table, [0, 1], 2))[1] == [2, 3, 4, 5, 6, 7]
    # Clamped to what the second job has, and to the first job's allocation groups.
    assert places(table, algorithm_1(table, [0, 1], 99))[1] == [1, 2, 3, 4, 5, 6]
    assert places(table, algorithm_1(table, [1, 0], 99))[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    # Below 0 the second job starts later, at the latest when the first is done.
    assert places(table, algorithm_1(table, [0, 1], -1))[1] == [5, 6, 7, 8, 9, 10]
    assert places(table, algorithm_1(table, [0, 1], -99))[1] == [8, 9, 10, 11, 12, 13]


def as_printed(num_ang, num_groups, p):
    """Algorithm 1 as Waterwave prints it, for jobs already in order: job -> indices."""
    idx1, idx2, offset = 0, num_ang[0], num_ang[0] - p
    placed = []
    for job, (angs, count) in enumerate(zip(num_ang, num_groups, strict=True)):
        mine = []
        early = p if job == 1 else 0
        for _ in range(early):
            mine.append(offset)
            offset += 1
        for _ in range(early, angs):
            mine.append(idx1)
            idx1 += 1
        for _ in range(angs, count):
            if job == len(num_ang) - 1 and idx2 > idx1:
                mine.append(idx1)
                idx1 += 1
            else:
                mine.append(idx2)
                idx2 += 1
        placed.append(mine)
    return placed


def test_the_printed_algorithm_puts_two_groups_of_a_job_at_one_index():
    # The last job catches up with the first one's row, then gets one index from either row.
    assert as_printed([2, 2], [4, 6], 0)[1] == [2, 3, 4, 4, 5, 5]
    table = table_of(triangle(2, 2), step_profile([[1, 1], [1, 1], [-1], [-1], [-1], [-1]]))
    index = algorithm_1(table, [0, 1], 0)
    assert places(table, index) == [[0, 1, 2, 3], [2, 3, 4, 5, 6, 7]]


def test_the_printed_algorithm_frees_before_it_allocates():
    # Three jobs; the second has more allocation groups than the first has groups left, so that
    # idx2 lies before its last allocation group.
    printed = as_printed([1, 4, 1], [2, 8, 2], 0)
    assert printed[1] == [1, 2, 3, 4, 2, 3, 4, 5]
    table = table_of(triangle(1), triangle(4), triangle(1))
    assert places(table, algorithm_1(table, [0, 1, 2], 0))[1] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_where_the_printed_algorithm_is_right_ours_is_the_same():
    for sizes in ((4, 4), (5, 3), (6, 3, 3)):
        table = table_of(*map(triangle, sizes))
        for p in range(min(sizes[:2]) + 1):
            printed = as_printed(sizes, [2 * size for size in sizes], p)
            if all((np.diff(mine) > 0).all() for mine in printed):
                assert places(table, algorithm_1(table, range(len(sizes)), p)) == printed


def test_three_jobs_take_turns_on_two_lanes():
    table = table_of(triangle(2), triangle(2), triangle(2))
    assert interleaved(table, [0, 1, 2], 2, 3).max() + 1 == 6
    assert staggered(table, [0, 1, 2], 0, 2).max() + 1 == 8
