"""How often a checkpoint is taken, as people write it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from waterflow.common.errors import JobError

_SECONDS = {"": 1, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60}
_SECONDS |= {"h": 3600, "hour": 3600, "d": 86400, "day": 86400}
_TEXT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]*)", re.ASCII)
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
        match = _TEXT.fullmatch(text.strip().lower())
        number, unit = match.groups() if match else ("0", "")
        unit = unit if unit in _SECONDS else unit.removesuffix("s")
        if float(number) > 0 and unit == "step" and float(number).is_integer():
            return cls(steps=int(float(number)))
        if float(number) > 0 and unit in _SECONDS:
            return cls(seconds=float(number) * _SECONDS[unit])
        raise JobError(f"checkpoint_every cannot be {text!r}: {_EXAMPLES}")
