"""The local coordinator: how fast the jobs on one GPU are let run (AntMan, section 4.3).

A guaranteed job must not notice the opportunistic one beside it. That one runs in the gaps that
the first leaves, and is throttled to the share of time that costs the first no more than
`TOLERANCE`. Jobs of the same class share as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from waterflow.cluster.spec import JobSpec
from waterflow.cluster.state import Speeds

#: What a guaranteed job may lose to opportunistic ones.
TOLERANCE = 0.01


class OnGpu(NamedTuple):
    """A job on a GPU."""

    spec: JobSpec
    opportunistic: bool


Limits = Callable[[Sequence[OnGpu], Speeds], list[float]]


def limits(jobs: Sequence[OnGpu], speeds: Speeds) -> list[float]:
    """The speed of each of the jobs on one GPU, of its speed alone, 0 to 1."""
    if len(jobs) == 1:
        return [1.0]
    firsts = [job for job in jobs if not job.opportunistic]
    return [_limit(job, jobs, firsts, speeds) for job in jobs]


def _limit(job: OnGpu, jobs: Sequence[OnGpu], firsts: Sequence[OnGpu], speeds: Speeds) -> float:
    speed = 1.0
    others = [other for other in jobs if other is not job]
    if not job.opportunistic:
        for other in others:
            speed *= 1.0 - TOLERANCE if other.opportunistic else speeds.shared(job.spec, other.spec)
        return max(speed, 1.0 - TOLERANCE) if len(firsts) == 1 else speed
    for other in others:
        if other.opportunistic:
            speed *= speeds.shared(job.spec, other.spec)
        else:
            speed *= _beside_guaranteed(job.spec, other.spec, speeds)
    return speed


def _beside_guaranteed(spec: JobSpec, first: JobSpec, speeds: Speeds) -> float:
    """In the gaps of `first`, or as much of the time as costs `first` the tolerance."""
    loss = 1.0 - speeds.shared(first, spec)
    duty = 1.0 if loss <= TOLERANCE else TOLERANCE / loss
    return max(1.0 - first.utilization, duty * speeds.shared(spec, first), 1e-6)
