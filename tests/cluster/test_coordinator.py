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
    assert first == pytest.approx(1 - TOLERANCE)  # no gaps: 2 % of the time costs 1 %
    assert guest == pytest.approx(0.02 * 0.5)
    # Two guests cost no more than one.
    assert limits([*busy, OnGpu(job(2), True)], Pairs(0.5))[0] == pytest.approx(1 - TOLERANCE)


def test_one_alone_has_all():
    assert limits([OnGpu(job(0), True)], Plain()) == [1.0]


def test_six_jobs_on_four_gpus_all_run_at_once():
    jobs = [job(i, seconds=100) for i in range(6)]
    found = simulate(jobs, ClusterSpec.of(1, 4), "gandiva", speeds=Plain())
    assert found.start.tolist() == [0] * 6
    # Four pairs of hands for six: 150 s of work each if it were shared evenly.
    assert found.makespan == 150
    assert found.migrations.sum() == 2  # who took turns moves to the GPUs that become free


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
