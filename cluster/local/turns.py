"""Turns on a server: its GPUs go round among all its jobs (Gandiva, sections 4.1 and 4.2.2).

A job that is suspended may go on on another GPU of its server, so six jobs of one GPU each on four
GPUs each have two thirds of the time, and not two of them all of it (Figure 9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from waterflow.cluster.local.coordinator import OnGpu, limits
from waterflow.cluster.state import Speeds

_LEAST = 1e-6  # a job is never quite forgotten


def server_shares(gpus: Sequence[Sequence[OnGpu]], speeds: Speeds) -> dict[int, float]:
    """The speed of each job on a server, of its speed alone, by the job's number.

    `gpus` says for each GPU which jobs were put there. Jobs that do more packed than in turns stay
    packed on their GPU. The others take turns on all other GPUs: those with a claim first, and
    within a class all alike.
    """
    if all(len(there) < 2 for there in gpus):
        return {job.spec.index: 1.0 for there in gpus for job in there}
    found: dict[int, float] = {}
    demand: Counter[bool] = Counter()
    turning: dict[int, bool] = {}
    capacity = len(gpus)
    for there in gpus:
        if _packed(there, speeds):
            capacity -= 1
            for job, speed in zip(there, limits(there, speeds), strict=True):
                found[job.spec.index] = min(speed, found.get(job.spec.index, 1.0))
            continue
        for job in there:
            demand[job.opportunistic] += 1
            turning[job.spec.index] = job.opportunistic
    rest = max(capacity - demand[False], 0)
    share = {
        False: min(1.0, capacity / max(demand[False], 1)),
        True: min(1.0, rest / max(demand[True], 1)),
    }
    for index, opportunistic in turning.items():
        found[index] = min(max(share[opportunistic], _LEAST), found.get(index, 1.0))
    return found


def _packed(there: Sequence[OnGpu], speeds: Speeds) -> bool:
    """Several jobs that do more at once than in turns, or of which one has a claim."""
    if len(there) < 2:
        return False
    if len({job.opportunistic for job in there}) > 1:
        return True
    return sum(limits(there, speeds)) > 1.0 + 1e-9
