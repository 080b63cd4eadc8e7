"""Keeps what a run's report needs: times, spans, the timeline, versions."""

from __future__ import annotations

import collections
import functools
import platform
import time
from importlib import metadata
from typing import Any

import numpy as np
import torch

from waterflow.common.text import text_of
from waterflow.common.units import format_bytes
from waterflow.engine.events import (
    BudgetChanged,
    CaptureKnown,
    DutyChanged,
    EagerStepBegun,
    EngineEnded,
    EpochEntered,
    Evaluated,
    Event,
    GroupsRan,
    HeldBack,
    JobJoined,
    LimitChanged,
    MemoryLent,
    MemoryTried,
    NeedsKnown,
    PackingDecided,
    ShareChanged,
    SlowdownMeasured,
    SpillPlanned,
    StateChanged,
    StepChecked,
    StepDone,
    TrainRan,
)
from waterflow.engine.states import JobState
from waterflow.report.decisions import Decision, Kind
from waterflow.report.evaluation import Evaluation
from waterflow.report.job_report import JobReport
from waterflow.report.report import Spans, Timeline
from waterflow.report.slowdown import Slowdown
from waterflow.report.spills import Spill

#: Spans of the first and the last groups are kept, this many of each.
_KEPT_SPANS = 10_000
_KEPT_DECISIONS = 1_000


class Recorder:
    """Records one engine's run in constant memory, but for a loss per step; subscribes to events.

    The jobs' reports say of their lives what the events say, and nothing else does.
    """

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._started: float | None = None
        self._stopped: float | None = None
        self._jobs: dict[str, JobJoined] = {}
        self._since: dict[str, float] = {}  # when each has begun to run
        self._decided_first: list[Decision] = []
        self._decided_last: collections.deque[Decision] = collections.deque(maxlen=_KEPT_DECISIONS)
        self._first: list[tuple[Any, ...]] = []
        self._last: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=_KEPT_SPANS)

    def __call__(self, event: Event | TrainRan) -> None:
        """Takes down what has happened."""
        match event:
            case JobJoined():
                self._jobs[event.job] = event
            case GroupsRan():
                self._keep(event)
            case TrainRan():
                self._take_down(event)
            case StepDone():
                report = self._jobs[event.job].report
                report.note_losses([event.loss])
                report.steps = event.step
            case Evaluated():
                found = Evaluation(event.step, dict(event.values))
                self._jobs[event.job].report.evaluations.append(found)
            case EagerStepBegun():
                self._jobs[event.job].report.eager_steps += 1
            case StepChecked():
                self._jobs[event.job].report.checks += 1
            case NeedsKnown():
                report = self._jobs[event.job].report
                report.persistent_bytes = event.persistent_bytes
                report.solo_peak_bytes = max(report.solo_peak_bytes or 0, event.solo_peak_bytes)
            case CaptureKnown():
                report = self._jobs[event.job].report
                report.captured, report.recaptures = event.captured, event.recaptures
                report.notes, report.tiers = list(event.notes), list(event.tiers)
                _note_losses(report)
                report.capture_seconds = event.capture_seconds
                report.capture_shared_with = event.shared_with
            case HeldBack():
                why = f"begins when {event.other!r} has ended: both have {event.reason}"
                self._decide(event.job, why, "waited")
            case EpochEntered():
                self._jobs[event.job].report.note_epoch(event.steps)
            case StateChanged():
                self._change_state(event)
            case ShareChanged():
                what = f"{event.priority}, weight {event.weight:g}"
                if event.priority == "guaranteed":
                    what += f", at most {100 * event.max_slowdown:g}% slower than alone"
                self._decide(event.job, what)
            case DutyChanged():
                self._held_back(event)
            case SlowdownMeasured():
                report = self._jobs[event.job].report
                report.slowdown = report.slowdown or Slowdown()
                report.slowdown.add(event.slowdown, event.error, event.seconds)
            case PackingDecided():
                how = "side by side" if event.side_by_side else "in turns"
                self._decide("", f"{how}: {event.gain:.2f} times as fast side by side")
            case LimitChanged():
                size = "none" if event.limit is None else format_bytes(event.limit)
                self._decide(event.job, f"its limit is {size}")
            case SpillPlanned():
                self._spills(event)
            case MemoryTried():
                self._tried(event)
            case MemoryLent():
                self._lent(event)
            case BudgetChanged():
                self._decide("", f"the budget is {format_bytes(event.budget)}")
            case EngineEnded():
                self._stopped = time.perf_counter()

    def _decide(self, job: str, what: str, kind: Kind = "other") -> None:
        decision = Decision(time.perf_counter() - self._origin, job, what, kind)
        kept = self._decided_first
        (kept if len(kept) < _KEPT_DECISIONS else self._decided_last).append(decision)

    def _lent(self, event: MemoryLent) -> None:
        what = "rests" if event.limit == 0 else "may need what it likes again"
        if event.limit:
            what = f"may need {format_bytes(event.limit)}"
        names = " and ".join(map(repr, event.first))
        why = f", as {names} asks for more" if names else ""
        self._decide(event.job, what + why, "waited")

    def _spills(self, event: SpillPlanned) -> None:
        spill = Spill(time.perf_counter() - self._origin, *event[1:])
        known = self._jobs[event.job].report.spills
        if len(known) < _KEPT_DECISIONS:
            known.append(spill)
        else:
            known[-1] = spill
        self._decide(event.job, spill.describe(), "spilled")

    def _tried(self, event: MemoryTried) -> None:
        for job, limit, speed in zip(event.jobs, event.limits, event.speeds, strict=True):
            if event.is_last:
                may = f"may need {format_bytes(limit)}, which helps all most"
                self._decide(job, f"{may}: {speed:.3g} steps/s", "waited")
            else:
                self._jobs[job].report.memory_speeds.append((limit, speed))

    def _held_back(self, event: DutyChanged) -> None:
        slower = f"{event.slowdown:+.1%} of its time alone, give or take {event.error:.1%}"
        for job in event.others:
            self._decide(
                job, f"works in {event.duty:.0%} of {event.job!r}'s time ({slower})", "throttled"
            )

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, of very much the first and the last."""
        return [*self._decided_first, *self._decided_last]

    def _change_state(self, event: StateChanged) -> None:
        report = self._jobs[event.job].report
        if event.after is JobState.SUSPENDED:
            self._decide(event.job, "rests, its memory is the others'", "waited")
        if event.before is JobState.RESUMING and event.after is JobState.RUNNING:
            self._decide(event.job, "goes on", "waited")
        if event.after is JobState.RUNNING:
            self._since.setdefault(event.job, time.perf_counter())
            self._started = self._started or time.perf_counter()
        if event.after.ended and event.job in self._since:
            report.wall_seconds = time.perf_counter() - self._since[event.job]
        if event.error is not None:
            report.exception = event.error
            report.error_type = type(event.error).__name__
            report.error = text_of(event.error) or type(event.error).__name__
        report.state = event.after.status
        _note_losses(report)

    @property
    def seconds(self) -> float:
        """Time of training so far: captures before it not included."""
        end = self._stopped or time.perf_counter()
        return end - (self._started or end)

    def _keep(self, event: GroupsRan) -> None:
        jobs = [self._jobs[name] for name in event.jobs]
        for lane, place, group, start, stop in event.spans:
            job = jobs[place]
            span = (lane, job.number, job.report.steps + 1, group, start, stop)
            (self._first if len(self._first) < _KEPT_SPANS else self._last).append(span)

    def _take_down(self, train: TrainRan) -> None:
        joined = self._jobs[train.job]
        report, number = joined.report, joined.number
        each = len(train.spans) // len(train.losses)
        spans = [
            (lane, number, train.first + place // each, group, start, stop)
            for place, (lane, _, group, start, stop) in enumerate(train.spans)
        ]
        left = _KEPT_SPANS - len(self._first)
        self._first += spans[:left]
        self._last.extend(spans[left:])
        report.note_losses(train.losses)
        report.steps = train.first + len(train.losses) - 1

    def spans(self, names: list[str]) -> Spans:
        """The spans kept, in seconds since the engine was made."""
        rows = np.array([*self._first, *self._last], dtype=float).reshape(-1, 6)
        lane, job, step, group = (rows[:, column].astype(int) for column in range(4))
        start, stop = rows[:, 4] - self._origin, rows[:, 5] - self._origin
        return Spans(lane, job, step, group, start, stop, names)

    def timeline(self, arena: Any, names: list[str]) -> Timeline:
        """The arena's own record of who held what when."""
        seconds, job, held = arena.timeline()
        return Timeline(seconds, job, held, names)


def _note_losses(report: JobReport) -> None:
    """The notes of a job that has ended say of its losses that they were no numbers."""
    ended = report.state in ("finished", "stopped", "failed", "out_of_memory")
    note = report.loss_note if ended else None
    if note is not None and note not in report.notes:
        report.notes.append(note)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    torchs, pythons = str(torch.__version__), platform.python_version()
    return {"waterflow": _own_version(), "torch": torchs, "python": pythons}


@functools.cache  # to look for it among what is installed takes longer than a small job's steps
def _own_version() -> str:
    try:
        return metadata.version("waterflow")
    except metadata.PackageNotFoundError:
        return "source"
