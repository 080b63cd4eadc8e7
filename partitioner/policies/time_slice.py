"""Time slicing: more jobs than can be in memory at all take turns in it (Gandiva, section 3.2)."""

from __future__ import annotations

import math
from typing import ClassVar

from waterflow.common.errors import JobError
from waterflow.common.units import parse_seconds
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
