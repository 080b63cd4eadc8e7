"""How often a checkpoint is taken, as people write it."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass

from waterflow.common.errors import JobError
from waterflow.common.units import parse_seconds

_STEPS = re.compile(r"([0-9]{1,15})(?:\.0*)?\s*steps?", re.ASCII)
_EXAMPLES = 'write a number of seconds, or a text such as "30s", "5min", "2h" or "100 steps"'


@dataclass(frozen=True)
class Interval:
    """So many steps of a job, or so many seconds; the other one is None."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: float | str) -> Interval:
        """Reads what a user has written.

        Raises:
            JobError: it is no interval; names the value.
        """
        if isinstance(value, str):
            return cls._of_text(value)
        good = type(value) in (int, float) and 0 < value < math.inf
        if not good:
            raise JobError(f"checkpoint_every cannot be {value!r}: {_EXAMPLES}")
        return cls(seconds=float(value))

    @classmethod
    def _of_text(cls, text: str) -> Interval:
        match = _STEPS.fullmatch(text.strip().lower())
        if match and int(match[1]) > 0:
            return cls(steps=int(match[1]))
        with contextlib.suppress(JobError):
            seconds = parse_seconds(text)
            if 0 < seconds < math.inf:
                return cls(seconds=seconds)
        raise JobError(f"checkpoint_every cannot be {text!r}: {_EXAMPLES}")
