"""Jobs begin a few at a time, where there are many.

All of hundreds of jobs could take turns from the beginning. Then each has a first step, each joins
a capture that no check has narrowed yet, and all that any of them makes lives as long as the
longest: what a step needs has left the core's caches whenever its turn comes, and a garbage
collection goes through all of it. Begun a few at a time, short jobs have ended before others begin,
and long ones are together within moments.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from waterflow.engine.job_run import JobRun
from waterflow.job.epochs import NumberedEpochs
from waterflow.partitioner.policies.fair_share import Priority

#: So many for each lane begin together. Others follow after so many seconds, or when fewer of them
#: are left than lanes, or nobody who has begun has a batch.
_FOR_A_LANE, _SECONDS = 4, 0.05


class Ramp:
    """Who trains of the jobs that could: those that have begun, and a few more every now and then.

    Attributes:
        waiting: those that are yet to begin, as of the latest choice.
    """

    def __init__(self, lanes: int) -> None:
        """Takes the number of lanes."""
        self._lanes = lanes
        self._latest = WeakSet[JobRun]()  # that were let begin
        self._next = 0.0  # when others are
        self.waiting = WeakSet[JobRun]()

    def choose(self, jobs: Sequence[JobRun]) -> list[JobRun]:
        """All but those that are yet to begin. Whoever goes before all others does not wait, nor do
        those who read data that are made once for all of them.

        Args:
            jobs: of an engine, in the order of their submission.
        """
        new = [job for job in jobs if not self._may_begin(job) and job.may_step]
        self.waiting = WeakSet(new)
        if not new:
            return list(jobs)
        going = [job for job in jobs if self._may_begin(job) and not job.ended]
        new.sort(key=lambda job: job.priority)
        first = min((job.priority for job in going), default=len(Priority))
        if new[0].priority < first or self.is_due(going):
            self._latest = WeakSet(new[: self._lanes * _FOR_A_LANE])
            self._next = time.monotonic() + _SECONDS
            self.waiting = self.waiting.difference(self._latest)
        return [job for job in jobs if job not in self.waiting]

    def _may_begin(self, job: JobRun) -> bool:
        """Whether it has begun, or may."""
        reads_with_others = isinstance(job.job.data, NumberedEpochs)
        return job.has_begun or job in self._latest or reads_with_others

    def is_due(self, going: Iterable[JobRun]) -> bool:
        """Whether others of those that wait are to begin.

        Args:
            going: those that do not.
        """
        if not self.waiting:
            return False
        left = sum(not job.ended for job in self._latest)
        is_time = left < self._lanes or time.monotonic() >= self._next
        return is_time or not any(job.may_step for job in going)
