"""What must hold of every plan of every policy: for our tests, and for authors of policies.

`check_plan` is the oracle: it works with the state's jobs alone, none of the policies' helpers.
"""

from __future__ import annotations

from collections import Counter

from waterflow.cluster.state import ClusterState, JobState, Plan
from waterflow.common.errors import PlanError


def check_plan(state: ClusterState, plan: Plan) -> None:
    """Raise PlanError where a plan cannot be carried out, or hurts whom it must not.

    No GPU that is not there or down, none twice for one job; no more jobs on a GPU than the cluster
    allows, nor more memory than it has; a job starts with as many GPUs as it asked for; only jobs
    that run stop or move, only jobs that wait start; guaranteed jobs are not made opportunistic
    while they run; jobs with a claim do not share a GPU unless the policy's kind is to share.
    """
    jobs = state.jobs
    _check_kinds(jobs, plan)
    places = {i: job.gpus for i, job in jobs.items() if job.gpus and i not in plan.stop}
    places |= {i: tuple(gpus) for i, gpus in (*plan.move.items(), *plan.start.items())}
    on_gpu: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    owner = state.cluster.owner
    for index, gpus in places.items():
        name = jobs[index].spec.name
        if len(set(gpus)) != len(gpus):
            raise PlanError(f"job {name!r} is given a GPU twice: {gpus}")
        for gpu in gpus:
            if not 0 <= gpu < state.cluster.gpus or owner[gpu] in state.down:
                raise PlanError(f"job {name!r} is given GPU {gpu}, which is not there")
            on_gpu[gpu] += 1
            memory[gpu] += jobs[index].spec.floor
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


def check_quotas(state: ClusterState, plan: Plan) -> None:
    """No tenant's jobs with a claim run on more GPUs than its quota."""
    used: Counter[str] = Counter()
    for index, job in state.jobs.items():
        gpus = plan.start.get(index) or plan.move.get(index) or job.gpus
        runs = index not in plan.stop or index in plan.start
        if runs and not plan.opportunistic.get(index, job.opportunistic):
            used[job.spec.tenant] += len(gpus)
    quotas = state.cluster.quotas
    for tenant, count in used.items() if quotas else ():
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


def check_exclusive(state: ClusterState, plan: Plan) -> None:
    """In addition, for a policy that does not share: nobody beside anybody, gangs whole."""
    check_plan(state, plan)
    taken: Counter[int] = Counter()
    for index, job in state.jobs.items():
        gpus = plan.start.get(index) or plan.move.get(index) or job.gpus
        if index not in plan.stop or index in plan.start:
            taken.update(gpus)
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


def check_guaranteed(state: ClusterState, plan: Plan) -> None:
    """No job with a claim is stopped that would fit if opportunistic jobs were not there."""
    claimed: set[int] = set()
    for index, job in state.jobs.items():
        gpus = plan.start.get(index) or plan.move.get(index) or job.gpus
        runs = index not in plan.stop or index in plan.start
        if runs and not plan.opportunistic.get(index, job.opportunistic):
            claimed.update(gpus)
    left = state.available - len(claimed)
    for index in plan.stop:
        job = state.jobs[index]
        if not job.opportunistic and job.spec.gpus <= left:
            raise PlanError(
                f"job {job.spec.name!r} has a claim and is stopped, though jobs with a claim leave "
                f"{left} GPUs and it needs {job.spec.gpus}"
            )
