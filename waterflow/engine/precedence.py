"""Who goes before whom while jobs flow, and by how much the others are held back for it.

A guaranteed job finds a lane free when it wants one, and the others beside it are throttled
(`allocator_ext/core/plan/throttle.h`) as far as they slow it down: its steps alone, with the others
held, and beside them are timed in turns (`allocator_ext/core/plan/alternation.h`), and the rule
of the coordinator (`partitioner/policies/coordinator.py`) answers with their duty (AntMan, sections
3.1 and 3.3).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from waterflow.allocator_ext import _C
from waterflow.engine.context import RunContext
from waterflow.engine.events import DutyChanged, SlowdownMeasured
from waterflow.engine.job_run import JobRun
from waterflow.partitioner.policies.coordinator import Pace, next_pace
from waterflow.partitioner.policies.fair_share import Priority

#: The longer all has been calm, the rarer are comparisons, in which the others are held again and
#: again: the next begins after at most so many times as long as the last took.
_AGAIN_AFTER = 8
#: Where others have come since, it is made after so many times as long.
_ANEW_AFTER = 2
#: A comparison has at most so many seconds of steps: as long as no duty is known to do harm, and
#: later. What the first overlooks shows with twice the duty.
_FIRST_LOOK, _LOOK = 1.0, 4.0
#: Jobs whose duty is 0 cannot be compared: they have done no harm in so many seconds.
_NOTHING_SECONDS = 1.0
#: While others are held for a comparison, eager ones of them ask so often whether they may begin.
_HELD_SECONDS = 0.005
#: A job that is compared and makes no steps for so long leaves its place to another.
_PATIENCE_SECONDS = 1.0


class _Work(NamedTuple):
    """Steps that a guaranteed job makes."""

    steps_before: int
    epoch_before: int
    kind: Hashable


@dataclass
class _Guaranteed:
    """What is known of one guaranteed job."""

    pace: Pace
    throttle: _C.Throttle  # the job's
    tolerance: float  # by how much it may be slower
    met: WeakSet[JobRun] = field(default_factory=WeakSet)  # all that have been beside it
    comparison: _C.Alternation | None = None  # the one under way
    begun: float = 0.0  # when that began, or the last one
    noted: float = 0.0  # when its times were last taken
    took: float = 0.0  # the last one
    again: float = 0.0  # when the next one may begin

    def compare(self, precedence: _C.Precedence) -> None:
        """Begins a comparison."""
        seconds = _FIRST_LOOK if math.isinf(self.pace.harmful) else _LOOK
        self.comparison = _C.Alternation(precedence, self.tolerance, seconds)
        self.throttle.compare(self.comparison)
        self.begun = self.noted = time.perf_counter()

    def drop(self) -> None:
        """Breaks the comparison off, where one is under way: nobody is held for it any more."""
        if self.comparison is not None:
            self.comparison.stop()
            self.throttle.compare(None)
            self.comparison = None

    def end(self, now: float) -> None:
        """The comparison has told what it can."""
        self.drop()
        self.took = now - self.begun
        self.again = now
        if self.pace.duty:  # else others stand still anyway, and wait to be tried again
            self.again += min(max(0, self.pace.calm - 1), _AGAIN_AFTER) * self.took

    def meet(self, others: Sequence[JobRun]) -> None:
        """Jobs that are new may do more harm than those before them, or less."""
        new = [job for job in others if job not in self.met]
        if not new:
            return
        self.met.update(new)
        self.again = min(self.again, self.begun + (1 + _ANEW_AFTER) * self.took)
        if len(new) == len(others):
            self._forget()

    def tolerate(self, slowdown: float) -> None:
        """The job may be slower by so much; what did harm, or none, is to be found out anew where
        that is another."""
        if slowdown != self.tolerance:
            self.tolerance = slowdown
            self.drop()
            self.again = 0.0
            self._forget()

    def _forget(self) -> None:
        """How far others go stays as it is, which duties did harm is not known any more."""
        unknown = {"harmless": 0.0, "harmful": math.inf}
        self.pace = self.pace._replace(**unknown, calm=0, failures=0, doubt=0.0)


class Precedence:
    """Of the jobs of one engine. `RunContext.state` guards all of it."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._first: WeakKeyDictionary[JobRun, _Guaranteed] = WeakKeyDictionary()
        # These, and those that were among them and may come back.
        self._known: WeakKeyDictionary[JobRun, _Guaranteed] = WeakKeyDictionary()
        self._others: list[JobRun] = []
        self._working: dict[JobRun, _Work] = {}
        self._unstoppable: set[JobRun] = set()  # others in eager steps, which end when they end
        self._reserved = 0

    def begin(self, jobs: Sequence[JobRun]) -> None:
        """These jobs flow from now on, or go before others than they did."""
        first = [job for job in jobs if job.priority is Priority.GUARANTEED]
        if not (first or self._first):  # nobody to look after, and there may be hundreds of jobs
            return
        for job, known in self._first.items():
            if job not in first:
                known.drop()  # its times are not of one stretch of time any more
        self._first = WeakKeyDictionary(
            {
                job: self._known.setdefault(
                    job, _Guaranteed(Pace(), job.throttle, job.max_slowdown)
                )
                for job in first
            }
        )
        self._others = [job for job in jobs if job not in self._first]
        for job in jobs:  # on a device its kernels go first, too
            job.throttle.first = job in self._first
        self._reserved = min(len(first), self._context.lanes.lanes - 1)
        for job, known in self._first.items():
            known.tolerate(job.max_slowdown)
            known.meet(self._others)
        self._set_duties()

    def end(self) -> None:
        """They flow no more, and may leave."""
        self._others = []

    @property
    def is_needed(self) -> bool:
        """Whether anybody goes first."""
        return bool(self._first)

    # Who may begin

    def candidates(self, waiting: Iterable[JobRun], busy: Collection[JobRun]) -> list[JobRun]:
        """Those of the waiting jobs that may begin a step now."""
        if not self._first:
            return list(waiting)
        occupied = sum(job not in self._first for job in busy)
        free = self._context.lanes.lanes - occupied - self._reserved > 0
        return [job for job in waiting if job in self._first or (free and self.may_begin(job))]

    def may_begin(self, job: JobRun) -> bool:
        """Whether a job that does not go first owes no rest. While all are held for a moment, only
        those begin that can be held in the middle of their steps."""
        if not job.throttle.may_begin():
            return False
        return not (self._are_held and job.next_is_eager)

    @property
    def _are_held(self) -> bool:
        precedence = self._context.precedence
        return precedence.holds and precedence.is_busy

    def rest(self, waiting: Iterable[JobRun]) -> float | None:
        """After how many seconds one of these jobs may begin that rest now; None where only
        somebody else can tell."""
        if not (self._first and self._context.precedence.is_busy):
            return None
        rests = [job.throttle.due for job in waiting if job not in self._first]
        shortest = min(rests, default=math.inf)
        least = _HELD_SECONDS if self._are_held else 1e-3
        return None if math.isinf(shortest) else max(shortest, least)

    def wants(self, job: JobRun, busy: Collection[JobRun]) -> bool:
        """Whether somebody who goes before this job has a batch and no lane: it should end soon."""
        if not self._first or job in self._first:
            return False
        return any(one not in busy and one.next_batch() is not None for one in self._first)

    # Their work

    def takes_lane(self, job: JobRun, kind: Hashable) -> None:
        """The job begins steps of a kind; None stands for eager ones."""
        if (known := self._first.get(job)) is not None:
            self._working[job] = _Work(job.loop.steps, job.loop.epoch, kind)
            self._context.precedence.enter()
            if known.comparison is not None:
                known.comparison.begin()
        elif kind is None:
            self._unstoppable.add(job)
            self._context.precedence.disturb(len(self._unstoppable))

    @contextlib.contextmanager
    def stands_aside(self, job: JobRun) -> Iterator[None]:
        """Inside, the job waits in its step for the steps of others: nobody is held back for it."""
        if job not in self._working:
            yield
            return
        self._context.precedence.leave()
        try:
            yield
        finally:
            self._context.precedence.enter()

    def gives_lane_back(self, job: JobRun) -> None:
        """The job has made those steps."""
        if job in self._unstoppable:
            self._unstoppable.discard(job)
            self._context.precedence.disturb(len(self._unstoppable))
        work = self._working.pop(job, None)
        if work is None:
            return
        self._context.precedence.leave()
        steps = job.loop.steps - work.steps_before
        if steps and job in self._first and self._others:
            self._note(job, work, time.perf_counter(), steps)

    def _note(self, job: JobRun, work: _Work, now: float, steps: int) -> None:
        known = self._first[job]
        comparison = known.comparison
        if comparison is None:
            self._perhaps_compare(known, now)
            return
        known.noted = now
        # Steps among which an epoch begins take longer, and are compared with such.
        comparison.leave(hash((work.kind, job.loop.epoch > work.epoch_before)), steps)
        harm = comparison.harm
        if not self._duty:
            harm = (0.0, 0.0) if now - known.begun > _NOTHING_SECONDS else None
        if harm is not None:
            self._judge(job, known, harm, now)

    def _perhaps_compare(self, known: _Guaranteed, now: float) -> None:
        """Begins the comparison of a job, where it is time for one: one job has one at a time."""
        other = next((one for one in self._first.values() if one.comparison is not None), None)
        if now < known.again or (other is not None and now < other.noted + _PATIENCE_SECONDS):
            return
        if other is not None:
            other.drop()
        known.compare(self._context.precedence)

    def _judge(
        self, job: JobRun, known: _Guaranteed, harm: tuple[float, float], now: float
    ) -> None:
        """After a comparison, which found a slowdown with an error: others go faster, or slower."""
        duty, tried = self._duty, known.pace._replace(duty=self._duty)
        pace = next_pace(tried, *harm, tolerance=known.tolerance)
        if known.pace.duty == duty or pace.duty < duty:  # else others hold them back further
            known.pace = pace
        known.end(now)
        others, publish = tuple(other.name for other in self._others), self._context.events.publish
        publish(SlowdownMeasured(job.name, others, duty, *harm, known.took))
        after = self._duty
        self._set_duties()
        if after != duty:
            for one in self._first.values():  # whoever bore less, or more, may bear this
                one.again = now
            publish(DutyChanged(job.name, others, after, *harm))

    @property
    def _duty(self) -> float:
        """What others may work beside all of them."""
        return min((known.pace.duty for known in self._first.values()), default=1.0)

    def _set_duties(self) -> None:
        duty = self._duty
        for job in self._first:  # it may have been held back for another until now
            job.throttle.duty = 1.0
        for job in self._others:
            job.throttle.duty = duty
