"""Jobs begin a few at a time, where there are many.

All of hundreds of jobs could take turns from the beginning. Then each has a first step, each joins
a capture that no check has narrowed yet, and all that any of them makes lives as long as the
longest: what a step needs has left the core's caches whenever its turn comes, and a garbage
collection goes through all of it. Begun a few at a time, short jobs have ended before others begin,
and long ones are together within moments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from waterflow.engine.job_run import JobRun
from waterflow.partitioner.policies.fair_share import Priority

#: So many for each lane begin together, and the next so many seconds later, or when there are fewer
#: of them left than lanes.
_FOR_A_LANE, _SECONDS = 4, 0.05


class Ramp:
    """Who flows of jobs that could: those that have begun, and a few more every now and then.

    Attributes:
        waiting: those that are yet to begin, as of the latest choice.
    """

    def __init__(self, lanes: int) -> None:
        """Takes the number of lanes."""
        self._lanes = lanes
        self._latest: Sequence[JobRun] = ()  # that were let begin
        self._next = 0.0  # when others are
        self.waiting: frozenset[JobRun] = frozenset()

    def choose(self, jobs: Sequence[JobRun]) -> list[JobRun]:
        """All but those that are yet to begin.

        Args:
            jobs: of an engine, in the order of their submission.
        """
        new = [job for job in jobs if not self._has_begun(job) and job.may_step]
        new.sort(key=lambda job: job.priority)
        going = [job.priority for job in jobs if self._has_begun(job) and not job.ended]
        is_urgent = bool(new) and new[0].priority < min(going, default=len(Priority))
        self.waiting = frozenset(new)
        if is_urgent or self.is_due():
            self._latest = new[: self._lanes * _FOR_A_LANE]
            self._next = time.monotonic() + _SECONDS
            self.waiting = self.waiting.difference(self._latest)
        return [job for job in jobs if job not in self.waiting]

    def _has_begun(self, job: JobRun) -> bool:
        return job.has_begun or job in self._latest

    def is_due(self) -> bool:
        """Whether others of those that wait are to begin."""
        if not self.waiting:
            return False
        left = sum(not job.ended for job in self._latest)
        return left < self._lanes or time.monotonic() >= self._next
