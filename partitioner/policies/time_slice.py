"""Time slicing: more jobs than can be in memory at all take turns in it (Gandiva, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from waterflow.common.errors import JobError
from waterflow.common.units import parse_seconds
from waterflow.partitioner.policies.fair_share import Share
from waterflow.partitioner.policies.flow import Flow


class TimeSlice(Flow):
    """Jobs flow as under `Flow`, those in memory; after each quantum others may have their turn.

    A job that gives way is suspended between two of its steps, where it holds least. Six equal jobs
    in room for four get 4/6 of the time each.
    """

    name: ClassVar[str] = "time-slice"
    quantum: float = 60.0

    def __init__(self, quantum: float | str = 60.0) -> None:
        """Args:
            quantum: seconds of a turn, or a text such as "30s" or "5min".

        Raises:
            JobError: it is no time above 0.
        """
        seconds = parse_seconds(quantum)
        if not 0 < seconds < math.inf:
            raise JobError(f"quantum must be a time above 0 such as '60s', got {quantum!r}")
        self.quantum = seconds

    def residents(self, shares: Sequence[Share], fit: Callable[[Sequence[int]], bool]) -> list[int]:
        """The places of the jobs that are in memory for the next turn: see `next_residents`."""
        return next_residents(shares, fit)


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
