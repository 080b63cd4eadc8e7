import pytest

from tests.support.clusters import job, state_of
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
from waterflow.cluster.policies.tiresias import Tiresias
from waterflow.cluster.simulator.costs import FREE, Costs
from waterflow.cluster.simulator.measured import Measured
from waterflow.cluster.simulator.speeds import Plain

pytestmark = pytest.mark.virtual


def test_jobs_grow_where_they_are_and_not_onto_nodes_that_slow_them_down():
    # vgg16 on two GPUs of two nodes is slower than on two of one; four of one are free for another.
    policy = ElasticTiresias()
    vgg = job(0, gpus=4, model="vgg16", batch=256)
    cluster = ClusterSpec.of(2, 4)
    state = state_of(cluster, policy, running=[(vgg, (0, 1, 2, 3), 0.0)], speeds=Measured())
    assert policy.decide(state).move == {}
    linear = state_of(cluster, policy, running=[(vgg, (0, 1, 2, 3), 0.0)], speeds=Plain())
    assert policy.decide(linear).move == {0: tuple(range(8))}


def test_a_new_job_finds_its_gpus_together_where_others_have_grown():
    policy = ElasticTiresias()
    cluster = ClusterSpec.of(2, 4)
    running = [(job(0), (0, 1, 2, 3), 0.0), (job(1), (4, 5, 6, 7), 0.0)]
    state = state_of(cluster, policy, waiting=[job(2, gpus=3)], running=running)
    plan = policy.decide(state)
    assert len({cluster.owner[gpu] for gpu in plan.start[2]}) == 1
    (shrunk,) = plan.move
    assert len(plan.move[shrunk]) == 1  # one gives three; the other keeps what nobody needs


def end_of(idle, costs, policy=None):
    """A job on four GPUs, two more that are idle for `idle` seconds, and a job that takes them."""
    jobs = [
        job(0, gpus=4, seconds=2000),
        job(1, gpus=2, seconds=500),
        job(2, 500.0 + idle, gpus=2, seconds=5000),
    ]
    cluster = ClusterSpec.of(1, 6)
    policy = policy or ElasticTiresias(limits=(1e9, 1e9))
    return simulate(jobs, cluster, policy, speeds=Plain(), costs=costs).finish[0]


def test_stopping_and_starting_loses_more_than_two_idle_minutes_bring():
    # Amoeba, section 3.2: 30 s to grow and 30 s to shrink, 360 GPU seconds instead of 480.
    alone = end_of(120, FREE, Tiresias(limits=(1e9, 1e9)))
    assert alone == 2000
    assert end_of(120, Costs(grow=1.14)) < alone < end_of(120, Costs(grow=30, shrink=30))
    # Worth it from three minutes on: half as fast again, for a minute lost.
    assert end_of(200, Costs(grow=30, shrink=30)) < alone
