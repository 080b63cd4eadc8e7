"""Side by side or in turns, as measured; the numbers are the loop's either way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import waterflow as wf
from tests.support.waiting import wait_until
from tests.waterflow.engine.test_precedence import ENDLESS, assert_equal_to_eager, make_job
from waterflow.engine import eager_train, packing
from waterflow.engine.events import PackingDecided

pytestmark = pytest.mark.cpu


@pytest.fixture
def tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials follow each other without a pause, and are over after few steps."""
    monkeypatch.setattr(packing, "_BETWEEN", 1)
    monkeypatch.setattr(eager_train, "_EAGER_SLICE_SECONDS", 0.01)


def run_until(
    decisions: int, capture: bool, further: int = 30, **options: Any
) -> tuple[wf.Report, list[Any]]:
    """Two jobs until so many decisions were made, and some steps beyond."""
    jobs = [make_job(name, width=64, steps=ENDLESS, capture=capture) for name in "ab"]
    made: list[PackingDecided] = []
    enough = threading.Event()

    def note(event: Any) -> None:
        if isinstance(event, PackingDecided):
            made.append(event)
            if len(made) == decisions:
                enough.set()

    with wf.Engine("64MiB", threads=1, **options) as engine:
        engine.subscribe(note)
        handles = [engine.submit(job) for job in jobs]
        assert enough.wait(300)
        before = [len(handle.losses) for handle in handles]
        pairs = list(zip(handles, before, strict=True))
        wait_until(lambda: all(len(handle.losses) >= made + further for handle, made in pairs))
        engine.stop_all()
    report = engine.report()
    for job in jobs:
        fresh = make_job(job.name, width=64, steps=report.jobs[job.name].steps)
        assert_equal_to_eager(job, report.jobs[job.name], fresh)
    return report, made


@pytest.mark.parametrize("capture", [True, False])
def test_what_was_measured_decides(
    capture: bool, tried_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the figures say, side by side or in turns; and tried again and again."""
    asked: list[tuple[list[float], list[float]]] = []

    def gain(packed: list[float], alone: list[float]) -> float:
        asked.append((list(packed), list(alone)))
        return 0.5 if len(asked) % 2 else 1.5

    monkeypatch.setattr(packing, "packing_gain", gain)
    report, made = run_until(4, capture)
    assert [event.side_by_side for event in made[:4]] == [False, True, False, True]
    assert all(event.jobs == ("a", "b") for event in made)
    for packed, alone in asked:
        assert all(speed > 0 for speed in (*packed, *alone))
    said = [decision.what for decision in report.decisions]
    assert said[:2] == [
        "in turns: 0.50 times as fast side by side",
        "side by side: 1.50 times as fast side by side",
    ]


def test_in_turns_no_two_lanes_work(tried_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gain(packed: list[float], alone: list[float]) -> float:
        monkeypatch.setattr(packing, "_BETWEEN", 10**9)  # the last trial
        return 0.5

    monkeypatch.setattr(packing, "packing_gain", gain)
    report, _ = run_until(1, True, 300)
    assert any(d.what.startswith("in turns") for d in report.decisions)
    # Of the 600 steps that followed: both jobs have heard of the decision long ago.
    late = np.argsort(report.spans.start)[-300:]
    start, stop = report.spans.start[late], report.spans.stop[late]
    assert (start[1:] >= stop[:-1] - 1e-4).all()


def test_a_fixed_number_of_lanes_is_what_was_asked_for(tried_at_once: None) -> None:
    jobs = [make_job(name, steps=400, capture=True) for name in "ab"]
    report = wf.run(jobs, memory="64MiB", threads=1, lanes=2)
    assert not [d for d in report.decisions if "side by side" in d.what]


@pytest.mark.parametrize("lanes", [0, 65, "many", 1.5, True])
def test_what_is_no_number_of_lanes(lanes: Any) -> None:
    with pytest.raises(wf.JobError, match=r"lanes must be a whole number from 1 to 64, or 'auto'"):
        wf.run([make_job("a")], memory="64MiB", lanes=lanes)
