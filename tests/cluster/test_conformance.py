"""What must hold of every policy, by random clusters and jobs; the oracle is our own."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.clusters import state_of
from waterflow.cluster import ClusterSpec, JobSpec, NodeSpec, simulate
from waterflow.cluster.local.coordinator import TOLERANCE
from waterflow.cluster.policies import POLICIES, make_policy
from waterflow.cluster.simulator.costs import MEASURED
from waterflow.cluster.simulator.failures import Failures
from waterflow.cluster.state import Plan
from waterflow.cluster.testing import (
    check_exclusive,
    check_gangs,
    check_guaranteed,
    check_not_slowed,
    check_plan,
    check_quotas,
    check_state,
)
from waterflow.common.errors import PlanError

pytestmark = pytest.mark.virtual

WORKING = [name for name in POLICIES if name != "nop"]
RESIZES = {"elastic-tiresias", "gandiva", "waterflow"}
MODELS = ["", "ResNet-50 (batch size 32)", "A3C", "vgg16", "bert"]


@st.composite
def clusters(draw):
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return ClusterSpec(tuple(NodeSpec(gpus, 16) for gpus in nodes), {"a": 2, "b": 2})


@st.composite
def traces(draw, gpus):
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 300),
                st.integers(1, gpus),
                st.integers(0, 4000),
                st.booleans(),
                st.sampled_from("ab"),
                st.integers(0, 12),
                st.sampled_from(MODELS),
                st.sampled_from([0.1, 0.5, 0.9, 1.0]),
                st.booleans(),
            ),
            min_size=1,
            max_size=12,
        )
    )
    rows.sort(key=lambda row: row[0])
    return [
        JobSpec(
            index,
            f"j{index}",
            float(submit),
            size,
            float(seconds),
            guaranteed=claim,
            tenant=tenant,
            memory=memory,
            least_memory=memory // 2 if elastic else 0,
            curve=((0.75, 0.8),) if elastic else (),
            adaptive=elastic,
            model=model,
            utilization=busy,
        )
        for index, row in enumerate(rows)
        for submit, size, seconds, claim, tenant, memory, model, busy, elastic in [row]
    ]


@st.composite
def problems(draw):
    cluster = draw(clusters())
    return cluster, draw(traces(cluster.gpus))


def checks(policy):
    def check(state, plan):
        check_state(state)
        check_plan(state, plan)
        check_guaranteed(state, plan)
        check_not_slowed(state, TOLERANCE)
        if policy.keeps_quotas:
            check_quotas(state, plan)
        if not policy.shares:
            check_exclusive(state, plan)
        if policy.name not in RESIZES:
            check_gangs(state, plan)

    return check


@pytest.mark.parametrize("name", WORKING)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_every_plan_can_be_carried_out_and_nobody_starves(name, problem):
    cluster, jobs = problem
    policy = make_policy(name)
    found = simulate(jobs, cluster, policy, check=checks(policy), costs=MEASURED)
    assert found.finished
    assert not any(map(bool, found.finish != found.finish))  # no nan: everybody is done
    again = simulate(jobs, cluster, make_policy(name), costs=MEASURED)
    assert again.finish.tolist() == found.finish.tolist()


@pytest.mark.parametrize("name", WORKING)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), seed=st.integers(0, 99))
def test_nodes_that_fail_lose_no_job(name, problem, seed):
    cluster, jobs = problem
    policy = make_policy(name)
    failures = Failures(mean=900.0, repair=100.0, checkpoint=50.0, seed=seed)
    found = simulate(jobs, cluster, policy, check=checks(policy), failures=failures)
    assert found.finished


@pytest.mark.parametrize("name", WORKING)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
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
    del state.jobs[0], state.jobs[1]
    with pytest.raises(PlanError, match="1 GPUs are free, 0 are in use, and there are 2"):
        check_state(state)
