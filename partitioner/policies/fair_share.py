"""Who runs next: of those that go first, the job that has had the least of the lanes' time, by its
weight.

Pure functions of what each job has used. The engine asks them where a lane is free, and so does the
simulator, so that what is predicted is what is done.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Priority(enum.IntEnum):
    """Who goes first (AntMan, section 3): a guaranteed job runs as if it were alone, opportunistic
    ones live from what the others leave."""

    GUARANTEED = 0
    NORMAL = 1
    OPPORTUNISTIC = 2


class Share(NamedTuple):
    """What a job has had of the lanes.

    Attributes:
        weight: its share among others; positive.
        used: seconds of lanes divided by the weight: equal for jobs that have had their due.
        priority: whoever has a higher one goes before all others.
    """

    weight: float = 1.0
    used: float = 0.0
    priority: Priority = Priority.NORMAL

    def after(self, seconds: float) -> Share:
        """The share once lanes have worked for the job that long."""
        return Share(self.weight, self.used + seconds / self.weight, self.priority)


NextJob = Callable[[Sequence[Share]], int]
"""From the shares of jobs that could run now, at least one, to the place of the one that does."""


def fair_share(waiting: Sequence[Share]) -> int:
    """Of the highest priority the job that has used the least by its weight; of equals the
    first."""
    keys = [(share.priority, share.used) for share in waiting]  # there may be hundreds
    return keys.index(min(keys))


def newcomer(weight: float, others: Iterable[Share], priority: Priority = Priority.NORMAL) -> Share:
    """The share of a job that joins: as if it had used as much as the one with the least, so that
    it neither overtakes the others for long nor waits for them."""
    return Share(weight, min((share.used for share in others), default=0.0), priority)


def next_residents(shares: Sequence[Share], fit: Callable[[Sequence[int]], bool]) -> list[int]:
    """Who has the next turn: whoever goes first, then whoever has had the least by its weight.

    Args:
        shares: of all jobs that could run; `used` counts seconds in memory.
        fit: whether the jobs at these places fit together.

    Returns:
        Places in `shares`, at least one where any fits. One that does not fit is passed over, and
        is the first of its priority soon, as it has no time meanwhile.
    """
    chosen: list[int] = []
    order = sorted(range(len(shares)), key=lambda i: (shares[i].priority, shares[i].used, i))
    for place in order:
        if fit([*chosen, place]):
            chosen.append(place)
    return chosen
