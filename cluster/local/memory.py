"""How many bytes of a GPU each job on it is given, and how fast it is with them (AntMan).

What a job does not get lies in the host's memory, or is computed again: the job's curve, which the
planner knows, says what that costs. A rule is a function of the jobs on one GPU, in the order in
which they came, and of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waterflow.cluster.local.coordinator import OnGpu
from waterflow.cluster.spec import JobSpec

MemoryRule = Callable[[Sequence[OnGpu], int], list[int]]
_PARTS = 32  # into which what opportunistic jobs share is cut


def coordinated(jobs: Sequence[OnGpu], capacity: int) -> list[int]:
    """Guaranteed jobs have what they ask for; the rest goes where it brings most (section 3.3)."""
    asked = [job.spec.memory for job in jobs]
    if sum(asked) <= capacity:
        return asked
    given = [job.spec.floor if job.opportunistic else job.spec.memory for job in jobs]
    if sum(given) > capacity:  # two with a claim, or floors alone: nobody has more than its floor
        given = [job.spec.floor for job in jobs]
    left = capacity - sum(given)
    part = max(left // _PARTS, 1)
    while left > 0:
        gains = [
            (squeezed(job.spec, min(has + part, job.spec.memory)) - squeezed(job.spec, has), -n)
            for n, (job, has) in enumerate(zip(jobs, given, strict=True))
            if has < job.spec.memory
        ]
        if not gains:
            break
        n = -max(gains)[1]
        more = min(part, jobs[n].spec.memory - given[n], left)
        given[n] += more
        left -= more
    return given


def first_come(jobs: Sequence[OnGpu], capacity: int) -> list[int]:
    """Universal memory alone: whoever came first keeps what it has (AntMan, Table 2, "UMem")."""
    given = []
    for job in jobs:
        given.append(min(job.spec.memory, capacity))
        capacity -= given[-1]
    return given


def all_or_nothing(jobs: Sequence[OnGpu], capacity: int) -> list[int]:
    """No such memory: a job that does not get all it asks for fails (AntMan, Table 2, "Pack")."""
    given = first_come(jobs, capacity)
    return [has if has == job.spec.memory else 0 for job, has in zip(jobs, given, strict=True)]


def squeezed(spec: JobSpec, memory: int) -> float:
    """A job's speed on so many bytes of a GPU, of its speed on all it asks for, 0 to 1.

    Straight lines between the points of its curve. A job without a curve is as fast on its least
    memory as on all, as far as anybody knows, and does not run on less.
    """
    if memory >= spec.memory:
        return 1.0
    if not spec.curve:
        return 1.0 if memory >= spec.floor else 0.0
    share = memory / spec.memory
    low, slow = 0.0, 0.0
    for high, fast in spec.curve:
        if share <= high:
            return slow + (fast - slow) * (share - low) / (high - low)
        low, slow = high, fast
    return slow + (1.0 - slow) * (share - low) / (1.0 - low)
