"""What must hold of every policy, by random clusters and jobs; the oracle is our own."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import cluster_decisions
from tests.support.clusters import state_of
from waterflow.cluster import ClusterSpec, JobSpec, simulate
from waterflow.cluster.local.coordinator import TOLERANCE
from waterflow.cluster.policies import POLICIES, make_policy
from waterflow.cluster.simulator.failures import Failures
from waterflow.cluster.spec import NodeSpec
from waterflow.cluster.state import Plan
from waterflow.cluster.testing import (
    check_decision_time,
    check_not_slowed,
    check_policy,
    check_quotas,
    check_state,
    every_check,
    problems,
)
from waterflow.common.errors import PlanError

pytestmark = pytest.mark.virtual

#: The same problems in every run, so that a change is what makes one fail; the soak draws others.
OPTIONS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

WORKING = [name for name in POLICIES if name != "nop"]


@pytest.mark.parametrize("name", WORKING)
@settings(OPTIONS, max_examples=40)
@given(problem=problems())
def test_every_plan_can_be_carried_out_and_nobody_starves(name, problem):
    check_policy(lambda: make_policy(name), *problem)


@pytest.mark.parametrize("name", WORKING)
@settings(OPTIONS, max_examples=40)
@given(problem=problems(quotas=True))
def test_no_tenant_exceeds_its_quota_and_all_its_jobs_get_done(name, problem):
    check_policy(lambda: make_policy(name), *problem)


@pytest.mark.parametrize("name", WORKING)
@settings(OPTIONS, max_examples=10)
@given(problem=problems(), seed=st.integers(0, 99))
def test_nodes_that_fail_lose_no_job(name, problem, seed):
    cluster, jobs = problem
    policy = make_policy(name)
    failures = Failures(mean=900.0, repair=100.0, checkpoint=50.0, seed=seed)
    found = simulate(jobs, cluster, policy, check=every_check(policy), failures=failures)
    assert found.finished


@pytest.mark.parametrize("name", WORKING)
@settings(OPTIONS, max_examples=20)
@given(problem=problems())
def test_a_decision_changes_nothing_and_is_the_same_again(name, problem):
    cluster, jobs = problem
    policy = make_policy(name)
    state = state_of(cluster, policy, waiting=jobs, now=500.0)
    before = dict(state.jobs)
    plan = policy.decide(state)
    assert policy.decide(state) == plan
    assert make_policy(name).decide(state) == plan
    assert dict(state.jobs) == before
    assert [state.occupants(gpu) for gpu in range(cluster.gpus)] == [()] * cluster.gpus


def test_the_checks_find_what_is_wrong():
    cluster = ClusterSpec.of(1, 2, quotas={"a": 1})
    policy = make_policy("antman")
    claim, guest = (
        JobSpec(n, f"j{n}", 0.0, 1, 100.0, tenant="a", guaranteed=n < 1) for n in range(2)
    )
    state = state_of(cluster, policy, running=[(claim, (0,), 0.0), (guest, (0,), 0.0)])
    slow = replace(state.jobs[0], step_time=1.1)
    state.jobs[0] = slow
    with pytest.raises(PlanError, match=r"has a claim and takes 1\.1 s a step"):
        check_not_slowed(state, TOLERANCE)
    with pytest.raises(PlanError, match="tenant 'a' has 2 GPUs with a claim and a quota of 1"):
        check_quotas(state, Plan(opportunistic={1: False}))
    both = Plan(start={0: (0,), 1: (1,)})
    del state.jobs[0], state.jobs[1]
    with pytest.raises(PlanError, match="1 GPUs are free, 0 are in use, and there are 2"):
        check_state(state)
    with pytest.raises(PlanError, match="tenant 'a' has 2 GPUs with a claim and a quota of 1"):
        check_quotas(state_of(cluster, policy, waiting=[claim, guest]), both, classes=False)


@pytest.mark.parametrize("moment", cluster_decisions.MOMENTS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_about_5000_gpus_and_2000_jobs_takes_at_most_50_ms(name, moment):
    policy = make_policy(name)
    check_decision_time(policy, cluster_decisions.state(policy, moment))


def test_a_slow_policy_is_found_out():
    class Slow(type(make_policy("fifo"))):
        def decide(self, state):
            for _ in range(8):  # ten times what it may take
                sorted(range(200_000), key=lambda n: -n)
            return super().decide(state)

    state = state_of(ClusterSpec.of(1, 1), make_policy("fifo"))
    with pytest.raises(PlanError, match=r"'fifo' takes .* ms for a decision about 1 GPUs"):
        check_decision_time(Slow(), state)


def test_nobody_is_squeezed_in_beside_one_upgraded_in_the_same_plan():
    def job(index, submit, steps, memory, **options):
        options = {"guaranteed": True, "tenant": "a", **options}
        return JobSpec(
            *(index, f"j{index}", submit, 1, steps), step_seconds=1.0, memory=memory, **options
        )

    cluster = ClusterSpec.of(2, 1, memory=16, sharing=2, quotas={"a": 1, "b": 1})
    half = {"least_memory": 6, "curve": ((0.75, 0.8),), "adaptive": True}
    jobs = [
        job(0, 0.0, 199.0, 10, utilization=0.1),
        job(1, 2.0, 208.0, 12, guaranteed=False, tenant="b", utilization=1.0),
        job(2, 6.0, 167.0, 12, utilization=0.5, **half),  # upgraded when the first has ended
        job(3, 10.0, 162.0, 10, utilization=1.0),
    ]
    check_policy(lambda: make_policy("antman"), cluster, jobs)


def test_a_guest_whose_node_fails_waits_with_its_claim():
    nodes = tuple(NodeSpec(gpus, 16) for gpus in (2, 2, 1))
    cluster = ClusterSpec(nodes, quotas={"a": 4, "b": 1}, sharing=2)
    short = {"steps": 0.0, "tenant": "a", "guaranteed": False, "utilization": 0.1}
    jobs = [JobSpec(index, f"j{index}", 0.0, 1, **short) for index in range(7)]
    jobs += [
        JobSpec(index, f"j{index}", 0.0, 1, 246.0, tenant="b", utilization=0.1)
        for index in (7, 8)  # the second becomes a guest of the first
    ]
    jobs.append(JobSpec(9, "j9", 0.0, 4, **short))
    policy = make_policy("waterflow")
    failures = Failures(mean=900.0, repair=100.0, checkpoint=50.0, seed=0)
    found = simulate(jobs, cluster, policy, check=every_check(policy), failures=failures)
    assert found.finished


@pytest.mark.soak
@pytest.mark.parametrize("name", WORKING)
@settings(OPTIONS, max_examples=500, derandomize=False)
@given(problem=problems(quotas=True), seed=st.none() | st.integers(0, 99))
def test_many_problems(name, problem, seed):
    cluster, jobs = problem
    if seed is None:
        check_policy(lambda: make_policy(name), cluster, jobs)
        return
    policy = make_policy(name)
    failures = Failures(mean=900.0, repair=100.0, checkpoint=50.0, seed=seed)
    assert simulate(jobs, cluster, policy, check=every_check(policy), failures=failures).finished
