"""Says what goes wrong in a run when it does: a job that fails, a loss that is no number any more,
jobs that cannot train side by side.

A report tells the same, but only to those who ask it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from waterflow.common.errors import JobFailedWarning, NonFiniteLossWarning, SharingWarning
from waterflow.common.text import error_line
from waterflow.common.warn import Place, place_of_error, warn_quietly_at
from waterflow.engine.events import Event, HeldBack, JobJoined, StateChanged, StepDone, TrainRan
from waterflow.report.job_report import JobReport


class Alarms:
    """Warns, once for each job or reason of an engine; subscribes to events."""

    #: What it has to hear of.
    KINDS = (HeldBack, JobJoined, StateChanged, StepDone, TrainRan)

    def __init__(self) -> None:
        self._reports: dict[str, JobReport] = {}
        self._places: dict[str, Place] = {}
        self._said: set[str] = set()  # why jobs do not train side by side
        self._losing: set[str] = set()  # jobs whose losses are no numbers any more
        #: What ends the engine, and so is nobody's own: `run` raises it.
        self.engines_error: BaseException | None = None

    def expect(self, job: str, place: Place) -> None:
        """A job is about to join; its warnings point there, where no line is known to be at
        fault."""
        self._places[job] = place

    def __call__(self, event: Event | TrainRan) -> None:
        """Looks at what has happened."""
        match event:
            case TrainRan():
                if not math.isfinite(sum(event.losses)):
                    self._look_at(event.job, event.first, event.losses)
            case StepDone():
                if not math.isfinite(event.loss):
                    self._look_at(event.job, event.step, [event.loss])
            case StateChanged():
                if event.error is not None and event.error is not self.engines_error:
                    self._tell_of_failure(event.job, event.error)
            case HeldBack():
                self._tell_of_sharing(event)
            case JobJoined():
                self._reports[event.job] = event.report

    def _look_at(self, job: str, first: int, losses: Sequence[float]) -> None:
        bad = next((n for n, loss in enumerate(losses, first) if not math.isfinite(loss)), None)
        if bad is None or job in self._losing:
            return
        self._losing.add(job)
        text = (
            f"job {job!r}: the loss of step {bad} is {losses[bad - first]}, and it trains on; "
            "stop_on_nan=True ends a job then"
        )
        warn_quietly_at(self._places[job], text, NonFiniteLossWarning)

    def _tell_of_sharing(self, event: HeldBack) -> None:
        """Once for all jobs that share something: there may be hundreds."""
        if event.reason in self._said:
            return
        self._said.add(event.reason)
        text = (
            f"job {event.job!r} trains when job {event.other!r} has ended, and not beside it, so "
            f"that both train as they would alone: both have {event.reason}. Give each job its own "
            "to train them side by side"
        )
        warn_quietly_at(self._places[event.job], text, SharingWarning)

    def _tell_of_failure(self, job: str, error: BaseException) -> None:
        steps = self._reports[job].steps
        text = (
            f"job {job!r} failed after {steps} step{'' if steps == 1 else 's'}: "
            f"{error_line(error)} (report.raise_errors() raises it)"
        )
        place = place_of_error(error) or self._places[job]
        warn_quietly_at(place, text, JobFailedWarning)
