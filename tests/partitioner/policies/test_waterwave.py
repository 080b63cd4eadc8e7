import time

import numpy as np
import pytest

from tests.support.plans import named
from waterflow.common.errors import JobError
from waterflow.partitioner import EVENT, GroupRef, Profile, verify
from waterflow.partitioner.policies import WaterWave, WaterWaveS
from waterflow.partitioner.policies.base import temporal_need
from waterflow.partitioner.testing import triangle

pytestmark = pytest.mark.virtual


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


def test_a_split_size_is_at_least_a_byte():
    with pytest.raises(JobError, match="split_size"):
        WaterWave(split_size=0)


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
    ("count", "nodes", "seconds"), [(2, 3000, 0.5), (8, 1500, 1.0), (50, 150, 2.0)]
)
def test_planning_is_quick(count, nodes, seconds):
    """Twenty times what it takes: a plan that compares all nodes with all others takes longer."""
    best = float("inf")
    for _ in range(3):  # fresh profiles, so that nothing is remembered; other load left out
        jobs = named(*(resembling_a_real_step(nodes, seed) for seed in range(count)))
        budget = int(1.3 * temporal_need([job.profile for job in jobs]))
        start = time.process_time()
        WaterWave().schedule(jobs, budget)
        best = min(best, time.process_time() - start)
    assert best < seconds
