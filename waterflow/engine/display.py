"""Shows on a progress display what happens in an engine."""

from __future__ import annotations

from waterflow.engine.events import (
    EngineEnded,
    Event,
    JobJoined,
    StateChanged,
    StepDone,
    Subscriber,
    TrainRan,
)
from waterflow.engine.states import JobState
from waterflow.report.job_report import JobReport
from waterflow.report.progress import ProgressDisplay


def show_on(display: ProgressDisplay) -> Subscriber:
    """A subscriber that keeps the display up to date."""
    reports: dict[str, JobReport] = {}
    running = JobState.RUNNING.status

    def show(event: Event | TrainRan) -> None:
        match event:
            case TrainRan():
                step = event.first + len(event.losses) - 1
                display.update(event.job, step, event.losses[-1], running)
            case StepDone():
                display.update(event.job, event.step, event.loss, running)
            case StateChanged() if _is_shown(event):
                report = reports[event.job]
                loss = report.losses[-1] if report.losses else None
                display.update(event.job, report.steps, loss, event.after.status)
            case JobJoined():
                reports[event.job] = event.report
                display.join(event.job, event.total_steps)
            case EngineEnded():
                display.stop()

    return show


def _is_shown(event: StateChanged) -> bool:
    """Whether users see it: not where a job is stopped that has not begun."""
    unbegun = event.before.status == "queued" and event.after is JobState.STOPPED
    return event.after.status != event.before.status and not unbegun
