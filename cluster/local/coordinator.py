"""The local coordinator: how fast the jobs on one GPU are let run (AntMan, section 3.3).

A guaranteed job must not notice the opportunistic one beside it. That one runs in the gaps that
the first leaves, and is throttled to the share of time that costs the first no more than
`TOLERANCE`. Jobs of the same class run at once where they are faster so than in turns; a packing
that does not pay is undone, and they take turns (Gandiva, section 4.2.2). Both by the engine's own
rules, asked with figures of tables instead of measured ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from waterflow.cluster.spec import JobSpec
from waterflow.cluster.state import Speeds
from waterflow.partitioner.policies.coordinator import TOLERANCE, settled_duty
from waterflow.partitioner.policies.packing import packing_pays

__all__ = ["TOLERANCE", "Limits", "OnGpu", "limits", "packing_pays"]


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
    if not job.opportunistic:
        lost = sum(_guest(g.spec, job.spec, speeds)[1] for g in jobs if g.opportunistic)
        return _among_equals(job, firsts, speeds) * (1.0 - min(lost, TOLERANCE))
    speed = _among_equals(job, [other for other in jobs if other.opportunistic], speeds)
    for first in firsts:
        speed *= _guest(job.spec, first.spec, speeds)[0]
    return speed


def _among_equals(job: OnGpu, equals: Sequence[OnGpu], speeds: Speeds) -> float:
    if len(equals) == 1:
        return 1.0
    packed = [_packed(one, equals, speeds) for one in equals]
    if packing_pays(packed, [1.0] * len(equals)):
        return next(p for p, one in zip(packed, equals, strict=True) if one is job)
    return 1.0 / len(equals)


def _packed(job: OnGpu, equals: Sequence[OnGpu], speeds: Speeds) -> float:
    speed = 1.0
    for other in equals:
        if other is not job:
            speed *= speeds.shared(job.spec, other.spec)
    return speed


@functools.lru_cache(maxsize=4096)
def _duty(loss: float) -> float:
    """Where the engine's rule comes to rest, if at a duty of 1 the guaranteed job loses so much."""
    return settled_duty(lambda duty: duty * loss)


def _guest(spec: JobSpec, first: JobSpec, speeds: Speeds) -> tuple[float, float]:
    """How fast a guest is, and what it costs `first`, both of the speed alone.

    In the gaps of `first` it costs nothing (AntMan, Table 5: 99 % of 10,000 jobs did not notice).
    Where there are none, it has as much of the time as costs the tolerance.
    """
    loss = 1.0 - speeds.shared(first, spec)
    duty = _duty(loss)
    throttled, gaps = duty * speeds.shared(spec, first), 1.0 - first.utilization
    if gaps >= throttled:
        return max(gaps, 1e-6), 0.0
    return max(throttled, 1e-6), max(duty * loss, 0.0)
