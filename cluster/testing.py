"""What must hold of every policy: the suite for our tests, and for authors of policies.

The strategies need hypothesis, which waterflow itself does not install. Use it on a policy of your
own::

    @given(problem=problems())
    def test_contract(problem):
        check_policy(MyPolicy, *problem)

    def test_decisions():
        check_decision_time(MyPolicy(), state)  # benchmarks/cluster_decisions.py makes some

The checks are oracles: they work with the state's jobs alone, none of the policies' helpers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf, isnan

from hypothesis import strategies as st

from waterflow.cluster.local.coordinator import TOLERANCE
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.run import simulate
from waterflow.cluster.simulator.costs import MEASURED
from waterflow.cluster.spec import ClusterSpec, JobSpec, NodeSpec
from waterflow.cluster.state import ClusterState, JobState, Plan
from waterflow.common.errors import PlanError

_ATTEMPTS = 8
_REFERENCE = 0.0015  # seconds of `_reference` on an idle virtual core (x86_64, 2026)
_MODELS = ("", "ResNet-50 (batch size 32)", "A3C", "vgg16", "bert")


@st.composite
def problems(draw: st.DrawFn, quotas: bool | None = None) -> tuple[ClusterSpec, list[JobSpec]]:
    """A small cluster and jobs that it can run; with quotas of two tenants, without, or either."""
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    gpus = sum(nodes)
    kept = draw(st.booleans()) if quotas is None else quotas
    claims = {name: draw(st.integers(1, gpus)) for name in "ab"} if kept else {}
    cluster = ClusterSpec(tuple(NodeSpec(count, 16) for count in nodes), claims)
    rows = draw(st.lists(_rows(gpus), min_size=1, max_size=12))
    rows.sort(key=lambda row: row[0])
    return cluster, [
        JobSpec(
            index,
            f"j{index}",
            float(submit),
            min(size, claims.get(tenant, size)),
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


def _rows(gpus: int) -> st.SearchStrategy[tuple[int, int, int, bool, str, int, str, float, bool]]:
    return st.tuples(
        st.integers(0, 300),
        st.integers(1, gpus),
        st.integers(0, 4000),
        st.booleans(),
        st.sampled_from("ab"),
        st.integers(0, 12),
        st.sampled_from(_MODELS),
        st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        st.booleans(),
    )


def check_policy(make: Callable[[], Policy], cluster: ClusterSpec, jobs: Sequence[JobSpec]) -> None:
    """Raise PlanError unless all that must hold does, all jobs get done, and twice the same way."""
    policy = make()
    found = simulate(jobs, cluster, policy, check=every_check(policy), costs=MEASURED)
    waiting = [job.name for job, at in zip(jobs, found.finish, strict=True) if isnan(at)]
    if waiting:
        raise PlanError(f"policy {policy.name!r} lets jobs wait for ever: {', '.join(waiting)}")
    again = simulate(jobs, cluster, make(), costs=MEASURED)
    if again.finish.tolist() != found.finish.tolist():
        raise PlanError(f"policy {policy.name!r} decides otherwise the second time")


def check_decision_time(policy: Policy, state: ClusterState, seconds: float = 0.05) -> None:
    """Raise PlanError unless a decision takes no more than so much CPU time.

    The fastest of some attempts counts, in time of this thread alone, and where the processor is
    slowed down by others now, by as much more: a loaded machine makes no good policy fail.
    """
    fastest = inf
    for _ in range(_ATTEMPTS):
        before = _reference()
        begin = time.thread_time()
        policy.decide(state)
        taken = time.thread_time() - begin
        fastest = min(fastest, taken / max(1.0, before / _REFERENCE))
        if fastest <= seconds:
            return
    raise PlanError(
        f"policy {policy.name!r} takes {1e3 * fastest:.1f} ms for a decision about "
        f"{state.cluster.gpus} GPUs and {len(state.jobs)} jobs, more than {1e3 * seconds:.0f}"
    )


def _reference() -> float:
    """CPU seconds of a fixed piece of Python."""
    begin = time.thread_time()
    table: dict[int, int] = {}
    for number in range(20_000):
        table[number & 1023] = table.get(number & 511, 0) + number
    return time.thread_time() - begin


def every_check(policy: Policy) -> Callable[[ClusterState, Plan], None]:
    """All that must hold of a policy of that kind, as a `check` for `simulate`."""

    def check(state: ClusterState, plan: Plan) -> None:
        check_state(state)
        check_plan(state, plan)
        check_quotas(state, plan, classes=policy.knows_opportunistic)
        check_guaranteed(state, plan, classes=policy.knows_opportunistic)
        check_not_slowed(state, TOLERANCE)
        if not policy.shares:
            check_exclusive(state, plan)
        if not policy.resizes:
            check_gangs(state, plan)

    return check


def check_plan(state: ClusterState, plan: Plan) -> None:
    """Raise PlanError where a plan cannot be carried out, or hurts whom it must not.

    No GPU that is not there or down, none twice for one job; no more jobs on a GPU than the cluster
    allows, nor more memory than it has; only jobs that run stop or move, only jobs that wait start.
    """
    _check_kinds(state.jobs, plan)
    on_gpu: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    owner = state.cluster.owner
    for job, gpus, _ in _running_after(state, plan):
        name = job.spec.name
        if len(set(gpus)) != len(gpus):
            raise PlanError(f"job {name!r} is given a GPU twice: {gpus}")
        for gpu in gpus:
            if not 0 <= gpu < state.cluster.gpus or owner[gpu] in state.down:
                raise PlanError(f"job {name!r} is given GPU {gpu}, which is not there")
            on_gpu[gpu] += 1
            memory[gpu] += job.spec.floor
    for gpu, count in on_gpu.items():
        if count > state.cluster.sharing:
            raise PlanError(f"GPU {gpu} is given {count} jobs, more than {state.cluster.sharing}")
        if memory[gpu] > state.cluster.nodes[owner[gpu]].memory:
            raise PlanError(f"GPU {gpu} is given jobs of {memory[gpu]} bytes, more than it has")


def check_state(state: ClusterState) -> None:
    """No GPU is lost: those that are free and those of running jobs are all there are."""
    used = {gpu for job in state.jobs.values() for gpu in job.gpus}
    if state.free + len(used) != state.available:
        raise PlanError(
            f"{state.free} GPUs are free, {len(used)} are in use, and there are {state.available}"
        )


def check_quotas(state: ClusterState, plan: Plan, *, classes: bool = True) -> None:
    """No tenant's jobs with a claim run on more GPUs than its quota.

    `classes`: the policy knows opportunistic jobs, which are outside of quotas; else all count.
    """
    quotas = state.cluster.quotas
    used = _used_by_tenant(state, plan, classes) if quotas else {}
    for tenant, count in used.items():
        if count > quotas.get(tenant, 0):
            raise PlanError(
                f"tenant {tenant!r} has {count} GPUs with a claim and a quota of "
                f"{quotas.get(tenant, 0)}"
            )


def check_not_slowed(state: ClusterState, tolerance: float) -> None:
    """No job with a claim is slower for an opportunistic one, but by `tolerance` of its speed."""
    owner = state.cluster.owner
    for job in state.jobs.values():
        nodes = {owner[gpu] for gpu in job.gpus}
        beside = {
            other.opportunistic
            for other in state.jobs.values()
            if other is not job and any(owner[gpu] in nodes for gpu in other.gpus)
        }
        if not job.gpus or job.opportunistic or beside != {True}:
            continue  # it shares with its equals, or with nobody
        alone = state.speeds.step_time(job.spec, len(job.gpus), len(nodes))
        if job.step_time * (1.0 - tolerance) > alone * (1.0 + 1e-9):
            raise PlanError(
                f"job {job.spec.name!r} has a claim and takes {job.step_time:.6g} s a step beside "
                f"opportunistic jobs, {alone:.6g} s alone"
            )


def check_exclusive(state: ClusterState, plan: Plan) -> None:
    """In addition, for a policy that does not share: nobody beside anybody."""
    taken = Counter(gpu for _, gpus, _ in _running_after(state, plan) for gpu in gpus)
    if taken and max(taken.values()) > 1:
        raise PlanError(f"GPU {taken.most_common(1)[0][0]} is given two jobs")


def check_gangs(state: ClusterState, plan: Plan) -> None:
    """For a policy that never resizes: a job starts on exactly as many GPUs as it asked for."""
    for index, gpus in (*plan.start.items(), *plan.move.items()):
        if len(gpus) != state.jobs[index].spec.gpus:
            raise PlanError(
                f"job {state.jobs[index].spec.name!r} asked for {state.jobs[index].spec.gpus} "
                f"GPUs and is given {len(gpus)}"
            )


def check_guaranteed(state: ClusterState, plan: Plan, *, classes: bool = True) -> None:
    """No job with a claim is stopped that would fit if opportunistic jobs were not there."""
    claimed = {g for _, gpus, claim in _running_after(state, plan) if claim for g in gpus}
    left, quotas = state.available - len(claimed), state.cluster.quotas
    used = _used_by_tenant(state, plan, classes) if quotas else Counter[str]()
    for index in plan.stop:
        job = state.jobs[index]
        tenant = job.spec.tenant
        room = min(left, quotas.get(tenant, 0) - used[tenant]) if quotas else left
        if not job.opportunistic and job.spec.gpus <= room:
            raise PlanError(
                f"job {job.spec.name!r} has a claim and is stopped, though jobs with a claim leave "
                f"{room} GPUs and it needs {job.spec.gpus}"
            )


def _used_by_tenant(state: ClusterState, plan: Plan, classes: bool) -> Counter[str]:
    used: Counter[str] = Counter()
    for job, gpus, claim in _running_after(state, plan):
        if claim or not classes:
            used[job.spec.tenant] += len(gpus)
    return used


def _running_after(
    state: ClusterState, plan: Plan
) -> Iterator[tuple[JobState, tuple[int, ...], bool]]:
    """The jobs that run when a plan is carried out: where, and whether with a claim."""
    stopped = set(plan.stop)
    for index, job in state.jobs.items():
        gpus = plan.start.get(index) or plan.move.get(index) or job.gpus
        if gpus and (index not in stopped or index in plan.start):
            yield job, tuple(gpus), not plan.opportunistic.get(index, job.opportunistic)


def _check_kinds(jobs: dict[int, JobState], plan: Plan) -> None:
    for index in (*plan.stop, *plan.move):
        if index not in jobs or not jobs[index].gpus:
            raise PlanError(f"job {index} is to stop or move, and does not run")
    for index, gpus in plan.start.items():
        if index not in jobs or jobs[index].gpus:
            raise PlanError(f"job {index} is to start, and does not wait")
        if not gpus:
            raise PlanError(f"job {jobs[index].spec.name!r} is to start on no GPU")
    for index, gpus in plan.move.items():
        if not gpus:
            raise PlanError(f"job {jobs[index].spec.name!r} is to move to no GPU")
    if len(set(plan.stop)) != len(plan.stop) or set(plan.stop) & set(plan.move):
        raise PlanError(f"jobs stop twice, or stop and move: {plan.stop}, {list(plan.move)}")
