"""Quotas: kept by every policy, in one place; nobody's jobs wait for another tenant's quota."""

import math

import pytest

from tests.support.clusters import job
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.policies import POLICIES, make_policy
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
from waterflow.cluster.quotas import Allowance
from waterflow.cluster.simulator.failures import Failures
from waterflow.cluster.simulator.speeds import Plain
from waterflow.cluster.state import Plan
from waterflow.cluster.testing import check_policy, every_check
from waterflow.common.errors import JobError, PlanError

pytestmark = pytest.mark.virtual

WORKING = [name for name in POLICIES if name != "nop"]
CLUSTER = ClusterSpec.of(1, 4, quotas={"a": 2, "b": 2})


class Greedy(Policy):
    """Starts whatever fits, and looks at no quota."""

    name = "greedy"
    source = summary = "a test"

    def decide(self, state):
        start, placer = {}, state.placer()
        walk = state.pending().walk()
        while head := walk.best(placer.total):
            start[head.job] = placer.place(head.gpus)
            walk.next()
        return Plan(start=start)


def used_by(found, tenant):
    """The most GPUs that a tenant's jobs have had at once."""
    changes = []
    for index, points in found.gpus_over_time.items():
        before = 0
        for at, gpus in points if found.jobs[index].tenant == tenant else ():
            changes.append((at, gpus - before))
            before = gpus
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", WORKING)
def test_a_full_quota_holds_up_its_tenant_alone(name):
    jobs = [job(i, 0.0, 2, 1000, tenant="a") for i in range(4)]
    jobs += [job(4, 10.0, 2, 50, tenant="b"), job(5, 10.0, 1, 50, tenant="a")]
    found = simulate(jobs, CLUSTER, name, speeds=Plain(), check=every_check(make_policy(name)))
    assert found.start[4] == 10
    assert found.finish[4] == 60
    assert found.finished
    if not make_policy(name).shares:  # others let jobs run as opportunistic meanwhile
        assert used_by(found, "a") == 2
        assert found.makespan >= 4 * 1000


def test_a_policy_that_looks_at_no_quota_is_found_out():
    jobs = [job(i, 0.0, 2, 100, tenant="a") for i in range(2)]
    with pytest.raises(PlanError, match="tenant 'a' has 4 GPUs with a claim and a quota of 2"):
        check_policy(Greedy, CLUSTER, jobs)
    with pytest.raises(PlanError, match="policy 'greedy' gives tenant 'a' 4 GPUs, and its quota"):
        simulate(jobs, CLUSTER, Greedy())
    check_policy(Greedy, ClusterSpec.of(1, 4), jobs)


def test_smaller_jobs_pass_only_where_the_policy_lets_them():
    jobs = [job(0, 0.0, 2, 100, tenant="a"), job(1, 1.0, 2, 100, tenant="a")]
    jobs += [job(2, 2.0, 1, 100, tenant="a")]
    cluster = ClusterSpec.of(1, 8, quotas={"a": 3})
    assert simulate(jobs, cluster, "fifo").start.tolist() == [0, 100, 100]
    assert simulate(jobs, cluster, "fjf").start.tolist() == [0, 100, 2]


def test_a_tenants_better_job_takes_the_quota_of_its_worse_one_alone():
    jobs = [job(0, 0.0, 2, 1000, tenant="a"), job(1, 0.0, 2, 1000, tenant="b")]
    jobs += [job(2, 10.0, 2, 20, tenant="a")]
    cluster = ClusterSpec.of(1, 8, quotas={"a": 2, "b": 2})  # half of it is idle
    for name in ("srtf", "srsf"):
        found = simulate(jobs, cluster, name)
        assert found.preemptions.tolist() == [1, 0, 0]
        assert found.finish.tolist() == [1020, 1000, 30]


def test_jobs_grow_within_their_quota_and_give_way():
    cluster = ClusterSpec.of(1, 8, quotas={"a": 3, "b": 4})
    jobs = [job(0, 0.0, 1, 300, tenant="a"), job(1, 50.0, 1, 50, tenant="a")]
    found = simulate(jobs, cluster, ElasticTiresias(), speeds=Plain())
    assert found.gpus_over_time[0][:2] == [(0, 3), (50, 2)]
    assert found.start[1] == 50
    assert used_by(found, "a") == 3
    adaptive = [job(0, 0.0, 1, 900, tenant="a", adaptive=True), job(1, 0.0, 1, 50, tenant="b")]
    adaptive += [job(2, 100.0, 2, 50, tenant="a")]
    found = simulate(adaptive, cluster, "gandiva", speeds=Plain())
    assert found.gpus_over_time[0][:3] == [(0, 1), (60, 3), (100, 1)]
    assert found.start[2] == 100


def test_opportunistic_jobs_are_outside_of_quotas_where_a_policy_knows_them():
    jobs = [job(i, 0.0, 1, 100, tenant="a", guaranteed=i < 1) for i in range(3)]
    cluster = ClusterSpec.of(1, 4, quotas={"a": 1})
    assert simulate(jobs, cluster, "fifo").start.tolist() == [0, 100, 200]
    for name in WORKING:
        if make_policy(name).knows_opportunistic:
            found = simulate(jobs, cluster, name, check=every_check(make_policy(name)))
            assert max(found.start) <= 10, name


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (job(0, gpus=3, tenant="a"), "job 'j0' asks for 3 GPUs and tenant 'a' has a quota of 2: "),
        (job(0, tenant="aa"), r"1 GPUs and tenant 'aa' has none \(near: a\)"),
        (
            job(0),
            "job 'j0' asks for 1 GPUs and names no tenant, and the cluster has quotas of a, b",
        ),
        (job(0, gpus=3, tenant="a", guaranteed=False), "which 'fifo' does not"),
    ],
)
def test_a_job_that_its_quota_will_never_hold_is_refused(one, message):
    with pytest.raises(JobError, match=message):
        simulate([one], CLUSTER, "fifo")


def test_others_simulators_know_no_quotas():
    with pytest.raises(JobError, match="simulator of muri knows no quotas: leave"):
        simulate([job(0, tenant="a")], CLUSTER, "srtf", compat="muri")


def test_an_allowance():
    allowance = Allowance({"a": 4}, {"a": 1})
    assert allowance.left("a", 9) == 3
    assert allowance.left(None, 9) == 9
    assert not allowance.fits("b", 1)
    allowance.take("a", 2)
    assert allowance.fits("a", 1)
    assert not allowance.fits("a", 2)
    allowance.close("a")
    assert not allowance.fits("a", 1)


def test_a_run_in_which_nothing_more_can_happen_ends_though_nodes_fail():
    failures = Failures(mean=1000.0, repair=10.0, checkpoint=10.0, seed=1)
    found = simulate([job(0)], ClusterSpec.of(2, 1), "nop", failures=failures)
    assert not found.finished
    assert math.isnan(found.finish[0])
