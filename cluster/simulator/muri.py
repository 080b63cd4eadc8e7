"""How Muri's simulator shares a GPU between two jobs (for its AntMan alone).

The stages of the opportunistic job's step, on the host, on the GPU and on the network, are fitted
into the gaps of the guaranteed job's stages; the step then takes as many steps of that one as it
needed gaps. Two opportunistic jobs take twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from waterflow.cluster.local.coordinator import OnGpu
from waterflow.cluster.spec import JobSpec
from waterflow.cluster.state import Speeds


def muri_limits(jobs: Sequence[OnGpu], speeds: Speeds) -> list[float]:
    """The speed of each of the jobs on a GPU, of its speed alone."""
    return [_limit(job, [other for other in jobs if other is not job]) for job in jobs]


def _limit(job: OnGpu, others: Sequence[OnGpu]) -> float:
    if not job.opportunistic:
        return 1.0
    longest = job.spec.step_seconds
    for other in others:
        if other.opportunistic:
            longest = max(longest, 2 * job.spec.step_seconds)
        else:
            longest = max(longest, _gaps(job.spec, other.spec) * other.spec.step_seconds)
    return job.spec.step_seconds / longest


def _gaps(spec: JobSpec, first: JobSpec) -> int:
    """Steps of `first` that a step of `spec` takes in its gaps."""
    host, gpu, network = spec.stages
    first_host, first_gpu, first_network = first.stages
    gap = first_gpu + first_network
    count, over = floor(host / gap), host % gap
    if over > 0:
        count += 1
        gpu -= min(gpu, first_network, gap - over)
    gap = first_host + first_network
    count, over = count + floor(gpu / gap), gpu % gap
    if over > 0:
        count += 1
        if over < first_host:
            network -= min(network, first_host + first_gpu - over)
    gap = first_host + first_gpu
    count, over = count + floor(network / gap), network % gap
    return count + (over > first_host)
