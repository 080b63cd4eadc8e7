"""When a job's captured steps are checked beside the eager one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Checks may take this share of the steps that the job has made. Before it has made many, they may
#: take as long as so many steps, or this share of all that it will make.
_SHARE, _FIRST_STEPS, _SHARE_OF_ALL = 0.01, 10, 0.025


class CheckSchedule:
    """When a job's captured steps are checked, beside the first use of each graph.

    "log" means steps 1, 2, 4, 8, ...; where a check costs many steps, as it does where steps are
    hardly more than Python, a due one waits until all of them cost less than their share.
    """

    def __init__(self, audit: str, steps: int | None = None) -> None:
        """Args:

        audit: see `Job`.
        steps: how many the job will make, where that is known.
        """
        self._audit = audit
        self._at_first = _FIRST_STEPS if steps is None else min(_FIRST_STEPS, _SHARE_OF_ALL * steps)
        self._due = 1  # from this step on
        self._seconds = 0.0  # that checks have taken beyond the steps in whose place they were
        self._last = 0.0
        self._step_seconds = 0.0  # what a captured step takes

    @property
    def compares(self) -> bool:
        """Whether checks compare numbers; with "off" a first use only looks at what is called."""
        return self._audit != "off"

    def is_due(self, step: int, step_seconds: float) -> bool:
        """Whether the job's step of this number (1, 2, ...) is to be checked.

        Args:
            step: its number.
            step_seconds: what its captured form takes.
        """
        if self._audit != "log" or step < self._due:
            return self._audit == "all"
        self._step_seconds = step_seconds
        share = max(_SHARE * step, self._at_first) * self._step_seconds
        return self._seconds + self._last <= share

    @contextlib.contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Around the check of the step of this number."""
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self._last = max(0.0, taken - self._step_seconds)
            self._seconds += self._last
            self._due = 1 << step.bit_length()
