"""When a job's captured steps are checked beside the eager one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Checks may take this share of the job's steps, or of so many steps where it has made fewer.
_CHECK_SHARE, _CHECK_STEPS = 0.01, 1000


class CheckSchedule:
    """When a job's captured steps are checked, beside the first use of each graph.

    "log" means steps 1, 2, 4, 8, ...; where a check costs many steps, as it does where steps are
    hardly more than Python, a due one waits until all of them cost less than their share.
    """

    def __init__(self, audit: str) -> None:
        self._audit = audit
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
        share = _CHECK_SHARE * max(step, _CHECK_STEPS) * self._step_seconds
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
