"""What is refused: jobs that can never run, and plans that give a tenant more than its quota."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.quotas import account_of
from waterflow.cluster.spec import ClusterSpec, JobSpec
from waterflow.cluster.state import ClusterState
from waterflow.common.errors import JobError, PlanError


def check_jobs(jobs: Sequence[JobSpec], cluster: ClusterSpec, policy: Policy) -> None:
    """Raise JobError where a job can never run: larger than the cluster, or than its quota."""
    if not jobs:
        raise JobError("the trace has no jobs")
    least = min(node.memory for node in cluster.nodes)
    for number, job in enumerate(jobs):
        if job.index != number:
            raise JobError(f"job {job.name!r} has the number {job.index} and is job {number}")
        if job.gpus > cluster.gpus:
            raise JobError(
                f"{job.called} asks for {job.gpus} GPUs and the cluster has {cluster.gpus}: "
                "simulate a larger cluster, or leave the job out (--skip-too-large)"
            )
        if job.gpus > most_gpus(job, cluster, policy):
            raise JobError(_beyond_quota(job, cluster, policy))
        if job.floor > least:
            raise JobError(
                f"{job.called} needs {job.floor} bytes on each GPU, and not all GPUs have them: "
                "simulate GPUs with more memory (--memory-gib), or leave the job out"
            )


def most_gpus(job: JobSpec, cluster: ClusterSpec, policy: Policy) -> int:
    """The most GPUs that a job may ever have under a policy: those of the cluster, or a quota."""
    opportunistic = policy.knows_opportunistic and not job.guaranteed
    account = account_of(cluster, job, opportunistic)
    return cluster.gpus if account is None else cluster.quotas.get(account, 0)


def _beyond_quota(job: JobSpec, cluster: ClusterSpec, policy: Policy) -> str:
    tenant, quotas = job.tenant, cluster.quotas
    asks = f"{job.called} asks for {job.gpus} GPUs"
    if not tenant:
        return (
            f"{asks} and names no tenant, and the cluster has quotas of {', '.join(quotas)}: name "
            "one in the trace's column tenant, or leave [quotas] out"
        )
    near = get_close_matches(tenant, quotas, n=2) or list(quotas)[:3]
    has = f"a quota of {quotas[tenant]}" if tenant in quotas else f"none (near: {', '.join(near)})"
    other = "or make it opportunistic where the policy knows such jobs (antman, waterflow)"
    if not job.guaranteed:
        other = f"or take a policy that knows opportunistic jobs, which {policy.name!r} does not"
    return (
        f"{asks} and tenant {tenant!r} has {has}: give the tenant a quota of {job.gpus} or more "
        f"([quotas]), leave the job out (--skip-too-large), {other}"
    )


def check_quotas(state: ClusterState, policy: Policy) -> None:
    """Raise PlanError where a tenant's jobs have more GPUs than its quota, whatever the policy."""
    quotas = state.cluster.quotas
    for tenant, gpus in state.used_by_tenant().items():
        if gpus > quotas.get(tenant, 0):
            raise PlanError(
                f"policy {policy.name!r} gives tenant {tenant!r} {gpus} GPUs, and its quota is "
                f"{quotas.get(tenant, 0)}: choose jobs along pending(level).walk(allowance)"
            )
