"""Whether lanes run jobs side by side or in turns, by what was measured (Gandiva, section 3.4).

Side by side is the rule. Now and then one job at a time is tried for a moment, and what all did
side by side is compared with that; where it was less, jobs take turns until it is tried again. A
trial is so short beside what lies between two that it costs less than 1 %.
"""

from __future__ import annotations

import enum
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from waterflow.engine.context import RunContext
from waterflow.engine.events import PackingDecided
from waterflow.engine.job_run import JobRun
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.partitioner.policies.packing import packing_gain

#: Seconds and stretches of steps of each job that tell how fast it is alone.
_ALONE_SECONDS, _ALONE_TIMES = 0.03, 3
#: A trial comes after so many times what the last one took; and a trial of the other way, where
#: jobs take turns, lasts so many times as long as the one alone.
_BETWEEN, _PACKED_TIMES = 100, 2
#: Turns have to be better by this much.
_MARGIN = 0.02


class _Mode(enum.Enum):
    PACKED = "side by side"
    ALONE = "one at a time, to see how fast each is"
    TRIED = "side by side, to see how fast all are"
    TURNS = "one at a time"


@dataclass
class _Rate:
    steps: int = 0
    seconds: float = 0.0
    times: int = 0

    @property
    def each(self) -> float:
        return self.steps / self.seconds

    @property
    def is_known(self) -> bool:
        return self.seconds >= _ALONE_SECONDS and self.times >= _ALONE_TIMES and self.steps > 0


@dataclass
class _Trial:
    """What was measured, by the jobs' numbers."""

    begun: float
    alone: dict[int, _Rate] = field(default_factory=lambda: defaultdict(_Rate))
    before: dict[int, int] = field(default_factory=dict)
    since: float = 0.0  # when all began to run side by side


class Packing:
    """Of the jobs of one engine. `RunContext.state` guards all of it."""

    def __init__(self, context: RunContext, undoes: bool) -> None:
        """`undoes`: whether jobs may be made to take turns; else they are side by side."""
        self._context = context
        self._undoes = undoes and context.lanes.lanes > 1
        self._jobs: Sequence[JobRun] = ()  # that flow
        self._flowed: frozenset[int] = frozenset()  # their numbers, or those of the latest that did
        self._mode = _Mode.PACKED
        self._trial = _Trial(time.perf_counter())
        self._next = time.perf_counter()  # when the next trial may begin
        self._taken: dict[JobRun, tuple[float, int]] = {}

    def begin(self, jobs: Sequence[JobRun]) -> None:
        """These jobs flow from now on."""
        numbers = frozenset(job.number for job in jobs)
        if numbers != self._flowed:
            self._mode = _Mode.PACKED
            self._next = time.perf_counter() + _BETWEEN * _ALONE_SECONDS * len(jobs)
        self._jobs, self._flowed = tuple(jobs), numbers

    def end(self) -> None:
        """They flow no more, and may leave."""
        self._jobs = ()
        self._taken.clear()

    def candidates(self, waiting: list[JobRun], busy: Collection[JobRun]) -> list[JobRun]:
        """Those of the waiting jobs that may begin a step now."""
        if not self._takes_turns:
            return waiting
        return [] if busy else self._still_unknown(waiting)

    @property
    def _takes_turns(self) -> bool:
        return self._undoes and self._mode in (_Mode.ALONE, _Mode.TURNS)

    def _still_unknown(self, waiting: list[JobRun]) -> list[JobRun]:
        if self._mode is _Mode.TURNS:
            return waiting
        alone = self._trial.alone
        return [job for job in waiting if not alone[job.number].is_known] or waiting

    def takes_lane(self, job: JobRun) -> None:
        """The job begins steps."""
        if self._undoes:
            self._taken[job] = time.perf_counter(), job.loop.steps

    def gives_lane_back(self, job: JobRun) -> None:
        """The job has made some."""
        begun = self._taken.pop(job, None)
        if begun is None:
            return
        now = time.perf_counter()
        if self._mode is _Mode.ALONE and begun[0] >= self._trial.begun:
            self._note_alone(job, now - begun[0], job.loop.steps - begun[1])
        elif self._mode is _Mode.TRIED:
            self._judge(now)
        elif now >= self._next and self._is_worth_a_trial():
            # Whoever is still at it does not count; nobody begins before they are done.
            self._mode, self._trial = _Mode.ALONE, _Trial(now)

    def _is_worth_a_trial(self) -> bool:
        going = [job for job in self._jobs if not job.ended]
        return len(going) > 1 and not any(job.priority is Priority.GUARANTEED for job in going)

    def _note_alone(self, job: JobRun, seconds: float, steps: int) -> None:
        rate = self._trial.alone[job.number]
        rate.steps, rate.seconds, rate.times = (
            rate.steps + steps,
            rate.seconds + seconds,
            rate.times + 1,
        )
        now = time.perf_counter()
        going = [one for one in self._jobs if not one.ended]
        if all(self._trial.alone[one.number].is_known for one in going):
            self._mode = _Mode.TRIED
            self._trial.since = now
            self._trial.before = {one.number: one.loop.steps for one in going}
        elif now - self._trial.begun > 10 * _ALONE_SECONDS * len(going):  # some wait for data
            self._settle(_Mode.PACKED)

    def _judge(self, now: float) -> None:
        trial = self._trial
        passed = now - trial.since
        if passed < _PACKED_TIMES * (trial.since - trial.begun):
            return
        going = [job for job in self._jobs if job.number in trial.before and not job.ended]
        if len(going) < len(trial.before):
            self._settle(_Mode.PACKED)
            return
        packed = [(job.loop.steps - trial.before[job.number]) / passed for job in going]
        gain = packing_gain(packed, [trial.alone[job.number].each for job in going])
        self._settle(_Mode.TURNS if gain < 1 - _MARGIN else _Mode.PACKED)
        names = tuple(job.name for job in going)
        self._context.events.publish(PackingDecided(names, self._mode is _Mode.PACKED, gain))

    def _settle(self, mode: _Mode) -> None:
        now = time.perf_counter()
        self._mode = mode
        self._next = now + _BETWEEN * (now - self._trial.begun)
