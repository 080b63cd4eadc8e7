import pytest

from tests.support.clusters import job, state_of
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.local.coordinator import TOLERANCE, OnGpu, limits, packing_pays
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.simulator.speeds import Plain

pytestmark = pytest.mark.virtual

#: Gandiva, Table 1: mini-batches per second in turns and packed.
TABLE_1 = {
    "VAE": (81.8, 419.3, True),
    "SuperResolution": (40.3, 145.2, True),
    "RHN": (10.1, 14.8, True),
    "SCRNN": (16.7, 23.3, True),
    "MI-LSTM": (22.2, 25.9, True),
    "LSTM": (63.8, 53.0, False),
    "ResNet-50": (10.3, 9.0, False),
    "ResNext-50": (83.6, 74.4, False),
}


class Pairs(Plain):
    def __init__(self, speed):
        self.speed = speed

    def shared(self, spec, other):
        return self.speed


@pytest.mark.parametrize("name", TABLE_1)
def test_packing_is_kept_where_it_pays(name):
    turns, packed, kept = TABLE_1[name]
    assert packing_pays([packed], [turns]) is kept
    # Two such jobs: in turns each has half, packed each has half of the packed throughput.
    pair = [OnGpu(job(0), False), OnGpu(job(1), False)]
    expected = packed / turns / 2 if kept else 0.5
    assert limits(pair, Pairs(packed / turns / 2)) == pytest.approx([expected] * 2)


def test_a_guaranteed_job_loses_no_more_than_the_tolerance():
    pair = [OnGpu(job(0, utilization=0.9), False), OnGpu(job(1), True)]
    assert limits(pair, Pairs(0.5)) == [1.0, pytest.approx(0.1)]  # in the gaps, at no cost
    busy = [OnGpu(job(0), False), OnGpu(job(1), True)]
    first, guest = limits(busy, Pairs(0.5))
    assert 1 - TOLERANCE <= first <= 1 - TOLERANCE / 2  # no gaps: 2 % of the time costs 1 %
    assert 0.01 * 0.5 <= guest <= 0.02 * 0.5
    # Two guests cost no more than one.
    assert limits([*busy, OnGpu(job(2), True)], Pairs(0.5))[0] >= 1 - TOLERANCE


def test_one_alone_has_all():
    assert limits([OnGpu(job(0), True)], Plain()) == [1.0]


def test_six_jobs_on_four_gpus_all_run_at_once():
    jobs = [job(i, seconds=100) for i in range(6)]
    found = simulate(jobs, ClusterSpec.of(1, 4), "gandiva", speeds=Plain())
    assert found.start.tolist() == [0] * 6
    # Gandiva, Figure 9: each has four sixths of the time.
    assert found.finish.tolist() == [150] * 6


def test_two_short_jobs_more_leave_the_others_their_part():
    # Figure 9, in minutes: four long jobs, two short ones at 25.
    jobs = [job(i, seconds=100) for i in range(4)] + [job(i, 25.0, seconds=10) for i in (4, 5)]
    found = simulate(jobs, ClusterSpec.of(1, 4), "gandiva", speeds=Plain())
    assert found.finish[4:].tolist() == [40, 40]
    assert found.finish[:4].tolist() == pytest.approx([105] * 4)  # 15 minutes at two thirds


def test_adaptive_jobs_grow_when_it_is_quiet_and_shrink_at_once():
    # Figure 11, in seconds: a job that can grow, two that end, and two that come.
    jobs = [
        job(0, seconds=40000, adaptive=True),
        job(1, seconds=1500),
        job(2, gpus=2, seconds=2700),
        job(3, 4500.0, gpus=2, seconds=9000),
        job(4, 5000.0, seconds=9000),
    ]
    found = simulate(jobs, ClusterSpec.of(1, 4), "gandiva", speeds=Plain())
    grown = found.gpus_over_time[0][:5]
    assert grown == [(0, 1), (1500, 2), (2700, 4), (4500, 2), (5000, 1)]
    plain = [job(0, seconds=40000), job(1, seconds=1500)]
    found = simulate(plain, ClusterSpec.of(1, 4), "gandiva", speeds=Plain())
    assert found.gpus_over_time[0] == [(0, 1), (40000, 0)]  # nobody grows who does not say so


def test_gandiva_puts_jobs_of_one_size_together():
    policy = Gandiva()
    cluster = ClusterSpec.of(2, 4)
    state = state_of(
        cluster, policy, waiting=[job(1), job(2, gpus=2)], running=[(job(0), (0,), 0.0)]
    )
    plan = policy.decide(state)
    assert cluster.owner[plan.start[1][0]] == 0
    assert {cluster.owner[gpu] for gpu in plan.start[2]} == {1}


def test_gandiva_empties_a_node_that_is_almost_empty():
    policy = Gandiva()
    cluster = ClusterSpec.of(2, 4)
    state = state_of(
        cluster, policy, running=[(job(0), (0,), 0.0), (job(1), (4,), 0.0), (job(2), (5,), 0.0)]
    )
    assert policy.decide(state).move == {0: (6,)}
