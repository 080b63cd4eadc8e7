"""Opportunistic jobs among themselves: memory goes to whom it helps most (AntMan, section 3.3).

Where nobody goes before them, and they do not fit side by side, their steps are planned into shares
of the memory, by the rule of `partitioner/policies/memory_share.py`: it is told what jobs do under
the limits of the moment, in steps a second, and says which ones are to be tried next. What they do
without limits counts as well, and stays where that is more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from waterflow.common.errors import BudgetError, JobError
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import MemoryTried
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.limits import Limits
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.partitioner.policies.memory_share import (
    MARGIN,
    Holder,
    MemoryShares,
    begin_sharing,
    next_shares,
    without,
)

#: Limits are tried for so long, and until each job that is in memory has made so many steps; but
#: for so many times as long at most.
_WINDOW_SECONDS, _LEAST_STEPS, _MOST_WINDOWS = 0.3, 4, 8
#: All is tried again after so many times what it took.
_AGAIN_AFTER = 100


class MemoryTrials:
    """Of the jobs of one engine; on the engine's thread, but for `are_over`."""

    def __init__(
        self, context: RunContext, queue: JobQueue, admission: Admission, limits: Limits
    ) -> None:
        self._context = context
        self._queue = queue
        self._admission = admission
        self._limits = limits
        self._jobs: list[JobRun] = []  # that share memory
        self._shares: MemoryShares | None = None
        self._without: list[float] = []  # what they do without limits
        self._before: list[int] = []  # steps of each, when the window began
        self._begun = self._since = 0.0
        self._ends: float | None = None  # when the window is over

    def are_over(self) -> bool:
        """Whether a window is; from any thread."""
        return self._ends is not None and time.perf_counter() >= self._ends

    def next(self) -> None:
        """Goes on to the next limits where the present ones have been tried."""
        if self._queue.holds_admission or self._context.lanes.lanes < 2:
            return
        jobs = self._sharing()
        if jobs != self._jobs:
            self._begin(jobs)
        elif self.are_over():
            self._judge()

    def _sharing(self) -> list[JobRun]:
        """The jobs that share memory, where there are any that have to."""
        jobs = [job for job in self._queue.jobs if not (job.ended or job.suspend_requested)]
        if not any(job.priority is Priority.OPPORTUNISTIC for job in jobs):
            return []
        going = [job for job in jobs if job.resident or job.next_batch() is not None]
        if any(job.priority is not Priority.OPPORTUNISTIC for job in going):
            return []
        sharing = [job for job in going if job.may_spill or job in self._limits.imposed]
        is_short = sum(map(self._limits.full, going)) > self._limits.capacity
        return sharing if is_short and len(sharing) > 1 else []

    def _begin(self, jobs: list[JobRun]) -> None:
        """Others share memory from now on, or nobody does."""
        was_learning, self._limits.is_learning = self._limits.is_learning, bool(jobs)
        goes_first = any(
            job.priority is not Priority.OPPORTUNISTIC and not job.ended for job in self._queue.jobs
        )
        if was_learning and not goes_first:  # else those limits are theirs who make room
            for job in [*self._limits.imposed]:
                self._set(job, None)
        self._jobs, self._shares, self._without = jobs, None, []
        self._ends = None
        if jobs:
            self._begun = time.perf_counter()
            self._open_window()

    def _open_window(self) -> None:
        self._before = [job.loop.steps for job in self._jobs]
        self._since = time.perf_counter()
        self._ends = self._since + _WINDOW_SECONDS
        self._admission.somebody_left()

    def _judge(self) -> None:
        """After a window."""
        now = time.perf_counter()
        made = [job.loop.steps - n for job, n in zip(self._jobs, self._before, strict=True)]
        inside = [n for job, n in zip(self._jobs, made, strict=True) if job.resident]
        is_short = min(inside, default=0) < _LEAST_STEPS
        if is_short and now < self._since + _MOST_WINDOWS * _WINDOW_SECONDS:
            self._ends = now + _WINDOW_SECONDS
            return
        if self._shares is not None and self._shares.is_settled:  # its time is over
            self._begin_anew()
            return
        speeds = [n / (now - self._since) for n in made]
        if not self._without:
            self._without = speeds
            self._start()
        else:
            assert self._shares is not None
            self._tell(self._shares.limits, speeds)
            self._shares = next_shares(self._shares, speeds)
        self._try()

    def _begin_anew(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            self._set(job, None)
        self._begin(jobs)

    def _start(self) -> None:
        """The first limits: by what can be spilled, and what others need who cannot."""
        names = set(self._jobs)
        others = [job for job in self._queue.jobs if job.resident and not job.ended]
        left = self._limits.capacity
        left -= sum(job.needs.memory.alone_bytes for job in others if job not in names)
        holders = []
        for job in self._jobs:
            most = self._limits.full(job)
            least = min(most, job.steps.smallest_limit())
            holders.append(Holder(least, most, job.weight))
        self._shares = begin_sharing(holders, left)

    def _try(self) -> None:
        """Plans all into what is to be tried, or into what is to stay."""
        while self._shares is not None:
            shares = self._shares
            if shares.is_settled and self._is_worth_nothing(shares):
                break
            refused = self._set_all(shares.limits)
            if refused is None:
                if shares.is_settled:
                    self._settle(shares)
                else:
                    self._open_window()
                return
            self._shares = without(shares, refused, shares.limits[refused])
            if not self._shares.first and self._shares.is_settled:
                break
        for job in self._jobs:
            self._set(job, None)
        self._rest()

    def _is_worth_nothing(self, shares: MemoryShares) -> bool:
        """Whether jobs do more without limits, in memory by turns."""
        if not shares.first:
            return True
        relative = [a / b for a, b in zip(self._without, shares.first, strict=True)]
        weights = [holder.weight for holder in shares.holders]
        did = sum(weight * one for weight, one in zip(weights, relative, strict=True))
        return did > shares.brought * (1 + MARGIN)

    def _settle(self, shares: MemoryShares) -> None:
        speeds = [
            seen.get(limit, 0.0) * first
            for seen, limit, first in zip(shares.seen, shares.limits, shares.first, strict=True)
        ]
        self._tell(shares.limits, speeds, is_last=True)
        self._rest()

    def _rest(self) -> None:
        """All is tried again in a while."""
        self._admission.somebody_left()
        self._shares = self._shares and self._shares._replace(is_settled=True)
        now = time.perf_counter()
        self._ends = None if self._shares is None else now + _AGAIN_AFTER * (now - self._begun)

    def _set_all(self, limits: Sequence[int]) -> int | None:
        """Plans all steps into these limits, those that shrink first; returns whose cannot be."""
        places = range(len(self._jobs))
        for place in sorted(places, key=lambda n: limits[n] - self._now(self._jobs[n])):
            job = self._jobs[place]
            is_all = limits[place] >= self._limits.full(job)
            if not self._set(job, None if is_all else limits[place]):
                return place
        return None

    def _now(self, job: JobRun) -> int:
        return self._limits.imposed.get(job, self._limits.full(job))

    def _set(self, job: JobRun, limit: int | None) -> bool:
        if job.ended or limit == self._limits.imposed.get(job):
            return True
        with contextlib.suppress(BudgetError, JobError):
            self._limits.impose(job, limit)
            return True
        return False

    def _tell(self, limits: Sequence[int], speeds: Sequence[float], is_last: bool = False) -> None:
        names = tuple(job.name for job in self._jobs)
        self._context.events.publish(MemoryTried(names, tuple(limits), tuple(speeds), is_last))
