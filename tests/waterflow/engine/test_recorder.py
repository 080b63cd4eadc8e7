"""The recorder writes reports from events, in constant memory but for the losses."""

from __future__ import annotations

import pytest

from waterflow.engine import recorder as module
from waterflow.engine.events import (
    CaptureKnown,
    EagerStepBegun,
    EngineEnded,
    EpochEntered,
    GroupsRan,
    JobJoined,
    NeedsKnown,
    StateChanged,
    StepChecked,
    StepDone,
)
from waterflow.engine.recorder import Recorder
from waterflow.engine.states import JobState
from waterflow.report.job_report import JobReport

pytestmark = pytest.mark.virtual


def joined(recorder: Recorder, name: str, number: int = 0) -> JobReport:
    report = JobReport(name=name)
    recorder(JobJoined(name, number, None, report))
    return report


def test_a_report_is_what_the_events_say() -> None:
    recorder = Recorder()
    report = joined(recorder, "a")
    assert (report.state, report.losses) == ("queued", [])
    recorder(StateChanged("a", JobState.QUEUED, JobState.PREPARING))
    assert report.state == "queued"
    recorder(NeedsKnown("a", 100, 300))
    recorder(StateChanged("a", JobState.PREPARING, JobState.RUNNING))
    recorder(NeedsKnown("a", 120, 200))
    recorder(CaptureKnown("a", "opaque step", ["why"], 2))
    recorder(EagerStepBegun("a"))
    recorder(StepChecked("a"))
    recorder(StepDone("a", 1, 0.5))
    recorder(EpochEntered("a", 1, 1))
    error = MemoryError("too large")
    recorder(StateChanged("a", JobState.RUNNING, JobState.FAILED, error))
    assert (report.state, report.error_type, report.error) == ("failed", "MemoryError", "too large")
    assert report.exception is error
    assert (report.losses, report.steps, report.epochs) == ([0.5], 1, 1)
    assert (report.persistent_bytes, report.solo_peak_bytes) == (120, 300), "the most, once known"
    assert (report.captured, report.notes, report.recaptures) == ("opaque step", ["why"], 2)
    assert (report.eager_steps, report.checks) == (1, 1)
    assert report.wall_seconds > 0


def test_time_runs_from_the_first_job_that_runs_to_the_end() -> None:
    recorder = Recorder()
    report = joined(recorder, "a")
    assert recorder.seconds == 0
    recorder(StateChanged("a", JobState.QUEUED, JobState.STOPPED))
    assert recorder.seconds == report.wall_seconds == 0, "it has never run"
    joined(recorder, "b")
    recorder(StateChanged("b", JobState.PREPARING, JobState.RUNNING))
    running = recorder.seconds
    assert recorder.seconds > running > 0
    recorder(EngineEnded())
    assert recorder.seconds == recorder.seconds


def test_spans_are_of_the_step_that_is_under_way() -> None:
    recorder = Recorder()
    joined(recorder, "a", 3)
    joined(recorder, "b", 5)
    recorder(StepDone("b", 7, 0.0))
    recorder(GroupsRan(("a", "b"), [(0, 0, 0, 1.0, 2.0), (1, 1, 4, 1.5, 2.5)]))
    spans = recorder.spans(["?", "?", "?", "a", "?", "b"])
    assert spans.job.tolist() == [3, 5]
    assert spans.step.tolist() == [1, 8]
    assert spans.lane.tolist() == [0, 1]
    assert spans.group.tolist() == [0, 4]
    assert (spans.stop - spans.start).tolist() == [1.0, 1.0]


def test_the_first_and_the_last_spans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_SPANS", 3)
    recorder = Recorder()
    joined(recorder, "a")
    for group in range(10):
        recorder(GroupsRan(("a",), [(0, 0, group, 0.0, 1.0)]))
    assert recorder.spans(["a"]).group.tolist() == [0, 1, 2, 7, 8, 9]
