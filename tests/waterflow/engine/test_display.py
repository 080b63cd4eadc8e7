"""What a display shows of a run: steps, and changes of state that users see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from waterflow.engine.display import show_on
from waterflow.engine.events import EngineEnded, JobJoined, StateChanged, StepDone
from waterflow.engine.states import JobState
from waterflow.report.job_report import JobReport

pytestmark = pytest.mark.virtual


class Shown:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, jobs: Sequence[tuple[str, int | None]]) -> None:
        raise AssertionError("jobs join")

    def join(self, name: str, total: int | None) -> None:
        self.calls.append(("join", name, total))

    def update(
        self, name: str, step: int, loss: float | None = None, state: str = "running"
    ) -> None:
        self.calls.append((name, step, loss, state))

    def stop(self) -> None:
        self.calls.append(("stop",))


def test_a_run_as_users_see_it() -> None:
    display, report = Shown(), JobReport(name="a")
    show = show_on(display)
    show(JobJoined("a", 0, 5, report))
    show(StateChanged("a", JobState.QUEUED, JobState.PREPARING))
    show(StateChanged("a", JobState.PREPARING, JobState.RUNNING))
    report.losses, report.steps = [0.5], 1
    show(StepDone("a", 1, 0.5))
    show(StateChanged("a", JobState.RUNNING, JobState.FINISHED))
    show(EngineEnded())
    assert display.calls == [
        ("join", "a", 5),
        ("a", 0, None, "running"),
        ("a", 1, 0.5, "running"),
        ("a", 1, 0.5, "finished"),
        ("stop",),
    ]


@pytest.mark.parametrize(
    ("after", "shown"), [(JobState.STOPPED, False), (JobState.FAILED, True)], ids=str
)
def test_a_job_that_never_began_is_shown_only_if_it_failed(after: JobState, shown: bool) -> None:
    display = Shown()
    show = show_on(display)
    show(JobJoined("a", 0, None, JobReport(name="a")))
    show(StateChanged("a", JobState.QUEUED, after))
    assert len(display.calls) == 1 + shown
