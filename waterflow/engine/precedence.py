"""Who goes before whom while jobs flow, and by how much the others are held back for it.

A guaranteed job finds a lane free when it wants one, and the others beside it are throttled
(`allocator_ext/core/plan/throttle.h`) as far as they slow it down: its steps are timed alone, with
the others held, and then beside them, and the coordinator's rule
(`partitioner/policies/coordinator.py`) answers with their duty (AntMan, sections 3.1 and 3.3).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from waterflow.engine.context import RunContext
from waterflow.engine.events import DutyChanged
from waterflow.engine.job_run import JobRun
from waterflow.partitioner.policies.coordinator import Pace, next_pace
from waterflow.partitioner.policies.fair_share import Priority

#: A window, and the time for which a job is timed alone, lasts until what it is to tell is known as
#: exactly as this, and for so long at least and at most.
_EXACT, _LEAST_SECONDS, _MOST_SECONDS = 0.004, 0.05, 0.5
#: So many stretches of steps do not count at first: somebody else's operator may have gone on.
_SETTLING = 2
#: A job is timed alone again after so many times as long as that took; sooner where it makes other
#: steps than it did alone.
_AGAIN_AFTER, _ANEW_AFTER = 200, 20
#: Of each time no more than so many times what was expected counts: a pause of the whole process is
#: nobody's harm.
_OUTLIER = 3.0


@dataclass
class _Alone:
    """A guaranteed job's times of one kind of step while the others are held, by stretches."""

    seconds: float = 0.0
    steps: int = 0
    times: int = 0
    squares: float = 0.0  # of the stretches' seconds a step

    def add(self, seconds: float, steps: int) -> None:
        self.seconds += seconds
        self.steps += steps
        self.times += 1
        self.squares += (seconds / steps) ** 2

    @property
    def each(self) -> float:
        return self.seconds / self.steps

    @property
    def is_known(self) -> bool:
        """Whether it is known exactly enough what a step takes."""
        if self.seconds < _LEAST_SECONDS or self.times < 3:
            return False
        spread = max(0.0, self.squares / self.times - self.each**2)
        exact = math.sqrt(spread / self.times) < _EXACT * self.each
        return exact or self.seconds > _MOST_SECONDS


@dataclass
class _Window:
    """How much slower than expected a guaranteed job has been for a while."""

    expected: float = 0.0
    excess: float = 0.0
    squares: float = 0.0
    times: int = 0

    def add(self, expected: float, seconds: float) -> None:
        excess = min(seconds, _OUTLIER * expected) - expected
        self.expected += expected
        self.excess += excess
        self.squares += excess**2
        self.times += 1

    @property
    def slowdown(self) -> float:
        return self.excess / self.expected

    @property
    def error(self) -> float:
        """The standard error of the slowdown."""
        if self.times < 2:
            return math.inf
        mean = self.excess / self.times
        spread = max(0.0, self.squares / self.times - mean**2)
        return math.sqrt(spread * self.times) / self.expected

    @property
    def is_full(self) -> bool:
        if self.expected < _LEAST_SECONDS or self.times < 3:
            return False
        return self.error < _EXACT or self.expected > _MOST_SECONDS


@dataclass
class _Guaranteed:
    """What is known of one guaranteed job's times."""

    alone: dict[Hashable, _Alone] = field(default_factory=lambda: defaultdict(_Alone))
    window: _Window = field(default_factory=_Window)
    is_timed: bool = False
    settling: int = _SETTLING
    since: float = 0.0  # when its times were last taken

    @property
    def cost(self) -> float:
        """The seconds for which the others were held."""
        return sum(alone.seconds for alone in self.alone.values())

    def lower(self, slowdown: float) -> None:
        """It has been faster beside others than it was alone, which was not fast enough then."""
        for alone in self.alone.values():
            alone.seconds *= 1 + slowdown
            alone.squares *= (1 + slowdown) ** 2

    def time_again(self) -> None:
        """Forgets its times."""
        self.alone.clear()
        self.window = _Window()
        self.is_timed, self.settling = False, _SETTLING


class Precedence:
    """Of the jobs of one engine. `RunContext.state` guards all of it."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._first: WeakKeyDictionary[JobRun, _Guaranteed] = WeakKeyDictionary()
        self._others: list[JobRun] = []
        self._working: dict[JobRun, tuple[float, int, Hashable]] = {}
        self._pace = Pace()
        self._reserved = 0
        self._timing: JobRun | None = None  # the job that is being timed alone

    def begin(self, jobs: Sequence[JobRun]) -> None:
        """These jobs flow from now on, or go before others than they did."""
        first = [job for job in jobs if job.priority is Priority.GUARANTEED]
        if not (first or self._first):  # nobody to look after, and there may be hundreds of jobs
            return
        known = {job: self._first.get(job, _Guaranteed()) for job in first}
        self._first = WeakKeyDictionary(known)
        self._others = [job for job in jobs if job not in self._first]
        for job in jobs:  # on a device its kernels go first, too
            job.throttle.first = job in self._first
        self._reserved = min(len(first), self._context.lanes.lanes - 1)
        self._choose_timing()
        self._set_duties()

    def end(self) -> None:
        """They flow no more, and may leave."""
        self._others, self._timing = [], None

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
        return [job for job in waiting if job in self._first or (free and job.throttle.may_begin())]

    def rest(self, waiting: Iterable[JobRun]) -> float | None:
        """After how many seconds one of these jobs may begin that rest now; None where only
        somebody else can tell."""
        if not (self._first and self._context.precedence.is_busy):
            return None
        rests = [job.throttle.due for job in waiting if job not in self._first]
        shortest = min(rests, default=math.inf)
        return None if math.isinf(shortest) else max(shortest, 1e-3)

    def wants(self, job: JobRun, busy: Collection[JobRun]) -> bool:
        """Whether somebody who goes before this job has a batch and no lane: it should end soon."""
        if not self._first or job in self._first:
            return False
        return any(one not in busy and one.next_batch() is not None for one in self._first)

    # Their work

    def takes_lane(self, job: JobRun, kind: Hashable) -> None:
        """The job begins steps of a kind."""
        if job in self._first:
            self._working[job] = time.perf_counter(), job.loop.steps, kind
            self._context.precedence.enter()

    def gives_lane_back(self, job: JobRun) -> None:
        """The job has made those steps."""
        begun = self._working.pop(job, None)
        if begun is None:
            return
        self._context.precedence.leave()
        started, before, kind = begun
        steps = job.loop.steps - before
        if steps and job in self._first:
            self._note(job, kind, time.perf_counter() - started, steps)

    def _note(self, job: JobRun, kind: Hashable, seconds: float, steps: int) -> None:
        known = self._first[job]
        if self._timing is job:
            self._note_alone(known, kind, seconds, steps)
            return
        alone = known.alone.get(kind)
        if not self._others:
            return
        if alone is None:  # a kind of step that it has not made alone
            self._time_again_after(_ANEW_AFTER, known)
            return
        known.window.add(alone.each * steps, seconds)
        if known.window.is_full:
            self._judge(job, known)

    def _note_alone(self, known: _Guaranteed, kind: Hashable, seconds: float, steps: int) -> None:
        if known.settling:
            known.settling -= 1
            return
        known.alone[kind].add(seconds, steps)
        if known.alone[kind].is_known:
            known.is_timed, known.since = True, time.perf_counter()
            self._choose_timing()
            self._set_duties()

    def _judge(self, job: JobRun, known: _Guaranteed) -> None:
        """After a window: others go faster, or slower."""
        window, known.window = known.window, _Window()
        if window.slowdown < -2 * window.error:
            known.lower(window.slowdown)
        former = self._pace
        self._pace = next_pace(former, window.slowdown, window.error)
        if self._pace.duty != former.duty:
            self._set_duties()
            others = tuple(other.name for other in self._others)
            changed = DutyChanged(job.name, others, self._pace.duty, window.slowdown, window.error)
            self._context.events.publish(changed)
        self._time_again_after(_AGAIN_AFTER, known)

    # Times alone

    def _time_again_after(self, times: float, known: _Guaranteed) -> None:
        """Times the job alone once more, where the last time was so many times its cost ago."""
        if time.perf_counter() - known.since > times * known.cost:
            known.time_again()
            self._choose_timing()
            self._set_duties()

    def _choose_timing(self) -> None:
        """The next job whose times alone are to be taken; it needs none where it is alone."""
        untimed = [job for job, known in self._first.items() if not (known.is_timed or job.ended)]
        self._timing = untimed[0] if untimed and self._others else None

    def _set_duties(self) -> None:
        duty = 0.0 if self._timing is not None else self._pace.duty
        for job in self._first:  # it may have been held back for another until now
            job.throttle.duty = 1.0
        for job in self._others:
            job.throttle.duty = duty if self._first else 1.0
