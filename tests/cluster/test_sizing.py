import pytest

from tests.support.clusters import job, state_of
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
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


def minutes_of_work(costs, policy=None):
    """Amoeba, section 3.2: a job on four GPUs, and two more that are idle for two minutes."""
    jobs = [job(0, gpus=4, seconds=1e4), job(1, gpus=2, seconds=1000), job(2, 1120.0, gpus=2)]
    found = simulate(jobs, ClusterSpec.of(1, 6), policy or ElasticTiresias(), speeds=Plain(),
                     costs=costs)  # fmt: skip
    return found.finish[0]


def test_stopping_and_starting_loses_more_than_two_idle_minutes_bring():
    from waterflow.cluster.policies.tiresias import Tiresias

    never = minutes_of_work(FREE, Tiresias())
    stop_resume = minutes_of_work(Costs(grow=30, shrink=30))
    amoeba = minutes_of_work(Costs(grow=1.14))
    assert amoeba < never < stop_resume
