import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.common.errors import BudgetError, JobError
from waterflow.partitioner import (
    EVENT,
    POLICIES,
    GroupRef,
    PlanJob,
    Profile,
    get_policy,
    node_times,
    partition,
    verify,
)
from waterflow.partitioner.policies import Temporal, WaterWave, WaterWaveS
from waterflow.partitioner.policies.arrangement import (
    GroupTable,
    algorithm_1,
    deal_lanes,
    interleaved,
    staggered,
)
from waterflow.partitioner.policies.base import temporal_need
from waterflow.partitioner.testing import check_contract, plan_jobs, step_profile, triangle

pytestmark = pytest.mark.virtual


def named(*profiles):
    return [PlanJob(f"job-{number}", profile) for number, profile in enumerate(profiles)]


def table_of(*profiles, split_size=1):
    groups = [partition(profile, split_size) for profile in profiles]
    return GroupTable.of(groups, profiles, [profile.node_seconds for profile in profiles])


def places(table, index):
    return [index[table.rows(job)].tolist() for job in range(table.num_jobs)]


# The contract, on every policy that has a name.


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None, max_examples=100)
@given(
    jobs=plan_jobs(),
    lanes=st.integers(1, 4),
    headroom=st.one_of(st.just(0.0), st.floats(0, 1), st.floats(1, 7)),
)
def test_contract(name, jobs, lanes, headroom):
    schedule = check_contract(get_policy(name), jobs, lanes, headroom)
    own = [job.profile for job in jobs]
    serial = sum(times.sum() for times in node_times(own))
    assert schedule.predicted_seconds(own) <= serial * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    jobs=plan_jobs(), lanes=st.integers(1, 4), split=st.integers(1, 500), headroom=st.floats(0, 3)
)
def test_contract_at_any_split_size(jobs, lanes, split, headroom):
    check_contract(WaterWave(split_size=split), jobs, lanes, headroom)


# Arrangements: every offset gives an order that barriers can honour.


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


def test_the_papers_figure_5():
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


# What the policies make of memory.


def test_temporal():
    jobs = named(triangle(2, persistent=3), triangle(4, persistent=5))
    schedule = Temporal().schedule(jobs, 12, lanes=3)
    assert schedule.pairs == ((GroupRef(0, 0), None, None), (GroupRef(1, 0), None, None))
    assert schedule.peak_bytes == 12
    assert schedule.overlap([job.profile for job in jobs]) == 0


def test_one_lane_is_temporal_order():
    jobs = named(triangle(2), triangle(8), triangle(4))
    for policy in (WaterWave(), WaterWaveS()):
        assert policy.schedule(jobs, 1000, lanes=1).pairs == tuple(
            (GroupRef(job, 0),) for job in range(3)
        )


@pytest.mark.parametrize(("count", "lanes"), [(2, 2), (4, 2), (8, 2), (3, 3), (8, 4), (2, 4)])
@pytest.mark.parametrize("policy", [WaterWave(), WaterWaveS()])
def test_ample_memory_fills_the_lanes(count, lanes, policy):
    jobs = named(*[triangle(32, 10)] * count)
    own = [job.profile for job in jobs]
    schedule = policy.schedule(jobs, 320 * count, lanes)
    assert schedule.predicted_seconds(own) == pytest.approx(64 * max(1, count / lanes))
    assert schedule.overlap(own) == 1


def test_ample_memory_fills_the_lanes_with_an_odd_job():
    jobs = named(*[triangle(32, 10)] * 3)
    own = [job.profile for job in jobs]
    schedule = WaterWave().schedule(jobs, 320 * 3)
    assert schedule.predicted_seconds(own) <= 1.05 * 96


@pytest.mark.parametrize(("factor", "overlap"), [(1.1, 0.2), (1.3, 0.25), (1.6, 0.4), (2.0, 1.0)])
def test_two_equal_jobs_overlap_more_with_more_memory(factor, overlap):
    jobs = named(triangle(64, 10), triangle(64, 10))
    own = [job.profile for job in jobs]
    budget = int(640 * factor)
    schedule = WaterWave().schedule(jobs, budget)
    verify(schedule, own, budget)
    assert schedule.overlap(own) >= overlap
    assert schedule.predicted_seconds(own) <= 256 / (1 + overlap)


def test_fine_groups_share_where_two_groups_cannot():
    jobs = named(triangle(64, 10), triangle(64, 10))
    own = [job.profile for job in jobs]
    assert WaterWaveS().schedule(jobs, 832).overlap(own) == 0
    assert WaterWave().schedule(jobs, 832).overlap(own) > 0.2


def test_waterwave_s_takes_the_better_cut():
    # A large temporary in backward is the peak; cut before it, half as much is held meanwhile.
    profile = step_profile([[10], [20], [-20, -10]], seconds=[1, 1, 1])
    for boundary, seconds in ((None, 6), (1, 5)):
        schedule = WaterWaveS().schedule([PlanJob("a", profile, boundary)] * 2, 40)
        verify(schedule, [profile] * 2, 40)
        assert schedule.predicted_seconds([profile] * 2) == seconds


def test_a_pair_has_its_cost():
    # Steps so short that barriers would cost more than two groups side by side save.
    jobs = named(*[triangle(4, 10, node_seconds=1e-7)] * 2)
    assert len(WaterWave().schedule(jobs, 80).pairs) == 2
    jobs = named(*[triangle(4, 10, node_seconds=1.0)] * 2)
    assert len(WaterWave().schedule(jobs, 60).pairs) > 2


def test_jobs_keep_the_callers_index():
    jobs = named(triangle(2, 1), triangle(50, 100), triangle(10, 10))
    schedule = WaterWave().schedule(jobs, 6000)
    verify(schedule, [job.profile for job in jobs], 6000)
    assert [groups[-1].stop for groups in schedule.groups] == [4, 100, 20]


def test_survivors_need_memory_in_the_order_given():
    # Fits only in the order given: the first job's survivors are small, the second's large.
    first = step_profile([[90], [-90], [1]])
    second = step_profile([[50], [40], [-40]])
    jobs = named(first, second)
    assert temporal_need([first, second]) == 91
    assert temporal_need([second, first]) == 140
    for name in POLICIES:
        verify(get_policy(name).schedule(jobs, 91), [first, second], 91)


# Refusals.


def test_the_budget_error_says_what_each_job_needs_and_what_fits():
    jobs = named(triangle(2, 10, persistent=5), triangle(90, 10, persistent=7), triangle(3, 10))
    with pytest.raises(BudgetError) as caught:
        Temporal().schedule(jobs, 100)
    assert str(caught.value).splitlines() == [
        "the jobs do not fit 100 B (100 bytes) even one after another; each needs:",
        "  job-0: 5 B held all the time + 20 B at the peak of its step",
        "  job-1: 7 B held all the time + 900 B at the peak of its step",
        "  job-2: 0 B held all the time + 30 B at the peak of its step",
        "one after another, 3 jobs need 912 B (912 bytes)",
        "in this budget would fit: job-0, job-2",
    ]
    with pytest.raises(BudgetError, match="none of them fits"):
        Temporal().schedule(jobs, 10)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_wrong_requests_are_refused(name):
    with pytest.raises(JobError, match="no jobs"):
        get_policy(name).schedule([], 100)
    with pytest.raises(JobError, match="lanes is 0"):
        get_policy(name).schedule(named(triangle(2)), 100, lanes=0)


def test_wrong_options_are_refused():
    with pytest.raises(JobError, match="split_size"):
        WaterWave(split_size=0)
    with pytest.raises(JobError, match="boundary 9"):
        PlanJob("a", triangle(2), 9)


def test_policies_by_name():
    assert get_policy("waterwave-s").name == "waterwave-s"
    with pytest.raises(JobError, match="did you mean waterwave"):
        get_policy("waterwaves")
    with pytest.raises(JobError, match="temporal or"):
        get_policy("???")


# Time to plan.


def resembling_a_real_step(nodes, seed):
    rng = np.random.default_rng(seed)
    half = nodes // 2
    sizes = rng.integers(1, 1 << 20, half)
    events = []
    for node, size in enumerate(sizes.tolist()):
        events += [(node, size, 2 * node), (node, 999, 2 * node + 1), (node, -999, 2 * node + 1)]
    for node, size in enumerate(sizes.tolist()[::-1], half):
        events.append((node, -size, 2 * (2 * half - 1 - node)))
    return Profile(np.array(events, EVENT), rng.uniform(1e-5, 1e-4, nodes), 1 << 20)


@pytest.mark.parametrize(
    ("count", "nodes", "seconds"), [(2, 3000, 0.05), (8, 1500, 0.5), (50, 150, 2.0)]
)
def test_planning_is_quick(count, nodes, seconds):
    best = float("inf")
    for _ in range(3):  # fresh profiles, so that nothing is remembered; other load left out
        jobs = named(*(resembling_a_real_step(nodes, seed) for seed in range(count)))
        budget = int(1.3 * temporal_need([job.profile for job in jobs]))
        start = time.process_time()
        WaterWave().schedule(jobs, budget)
        best = min(best, time.process_time() - start)
    assert best < seconds
