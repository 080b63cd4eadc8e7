"""Jobs that share a Python object which one of them may change begin when the other has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import waterflow as wf
from tests.support.shared_objects import Criterion, job
from waterflow.engine.events import HeldBack

pytestmark = pytest.mark.cpu
ENDLESS = 10**9


def named(name: str, **given: Any) -> wf.Job:
    made = job(**{"steps": 6, **given})
    made.name = name
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_the_second_begins_when_the_first_has_ended_and_the_report_says_why() -> None:
    one = Criterion()
    jobs = [named(name, loss=one) for name in ("a", "b", "c")]
    with pytest.warns(wf.SharingWarning, match="job 'b' trains when job 'a' has ended") as caught:
        report = wf.run(jobs, memory="64MiB")
    report.raise_errors()
    assert len([w for w in caught if w.category is wf.SharingWarning]) == 1
    assert "its own" in str(caught[0].message)
    assert not any("had ended" in note for note in report.jobs["a"].notes)
    for name, before in (("b", "a"), ("c", "b")):
        note = report.jobs[name].notes[0]
        assert f"when job {before!r} had ended" in note
        assert "Criterion.__call__" in note
    decided = {each.job: each.what for each in report.decisions if "begins when" in each.what}
    assert decided.keys() == {"b", "c"}
    assert "begins when 'b' has ended" in decided["c"]


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_others_train_beside_them() -> None:
    one = Criterion()
    with wf.Engine("64MiB") as engine:
        events: list[HeldBack] = []
        engine.subscribe(lambda event: events.append(event) if type(event) is HeldBack else None)
        first = engine.submit(named("first", loss=one, steps=ENDLESS))
        second = engine.submit(named("second", loss=one))
        third = engine.submit(named("third", loss=Criterion()))
        assert third.result(60).ok
        assert (first.status, second.status) == ("running", "queued")
        assert not second.waits_for_room
        first.stop()
        assert second.result(60).steps == 6
    assert [(event.job, event.other) for event in events] == [("second", "first")]


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_one_that_waits_can_be_stopped_and_suspended() -> None:
    one = Criterion()
    with wf.Engine("64MiB") as engine:
        first = engine.submit(named("first", loss=one, steps=ENDLESS))
        stopped = engine.submit(named("stopped", loss=one))
        rests = engine.submit(named("rests", loss=one))
        wait_for(lambda: len(first.losses) > 3)
        stopped.stop()
        assert stopped.result(60).state == "stopped"
        assert rests.suspend(timeout=60)
        first.stop()
        assert first.result(60).state == "stopped"
        wait_for(lambda: rests.status == "suspended")
        assert not rests.losses
        rests.resume()
        assert rests.result(60).steps == 6


@pytest.mark.filterwarnings(
    "ignore::waterflow.SharingWarning", "ignore::waterflow.JobFailedWarning"
)
def test_the_first_may_fail() -> None:
    one = Criterion()

    def fails(result: wf.StepResult) -> None:
        raise ValueError("no more")

    report = wf.run([named("a", loss=one, on_step=fails), named("b", loss=one)], memory="64MiB")
    assert report.jobs["a"].state == "failed"
    assert report.jobs["b"].steps == 6


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_one_that_does_not_fit_fails_alone() -> None:
    """It was not prepared when the others began."""
    one = Criterion()
    large = nn.Sequential(nn.Linear(8, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 3))
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([named("a", loss=one), named("b", loss=one, model=large)], memory="4MiB")
    assert report.jobs["a"].ok
    assert report.jobs["b"].state == "out_of_memory"


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_they_are_checkpointed(tmp_path: Path) -> None:
    one = Criterion()
    jobs = [named(name, loss=one) for name in ("a", "b")]
    wf.run(jobs, memory="64MiB", checkpoint=tmp_path / "run").raise_errors()
    again = [named(name, loss=one) for name in ("a", "b")]
    report = wf.run(again, memory="64MiB", resume=tmp_path / "run")
    report.raise_errors()
    assert [each.resumed_steps for each in report.jobs.values()] == [6, 6]


def test_callbacks_may_share_what_they_like(recwarn: pytest.WarningsRecorder) -> None:
    """One endless job does not keep the other, with the same list, from its end."""
    seen: list[str] = []

    def told(name: str) -> Callable[[wf.StepResult], None]:
        return lambda result: seen.append(name)

    with wf.Engine("64MiB") as engine:
        first = engine.submit(named("a", on_step=told("a"), steps=ENDLESS))
        assert engine.submit(named("b", on_step=told("b"))).result(60).ok
        first.stop()
    assert seen.count("b") == 6
    assert not [w for w in recwarn if w.category is wf.SharingWarning]
