"""Opportunistic jobs among themselves: memory goes to whom it helps, numbers stay the loop's."""

from __future__ import annotations

from typing import Any

import pytest

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.needs import needed
from tests.support.waiting import wait_until
from tests.waterflow.engine.test_surges import make_wide
from waterflow.engine import memory_trials
from waterflow.engine.events import MemoryTried
from waterflow.report.report import Report

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trials, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(memory_trials, "_LEAST_STEPS", 2)


def run_until(engine: wf.Engine, jobs: list[wf.Job], tried: list[MemoryTried], count: int) -> Any:
    handles = [engine.submit(job) for job in jobs]
    wait_until(lambda: len(tried) >= count)
    engine.stop_all()
    return handles


def test_shares_are_tried_within_the_budget() -> None:
    wide = needed(make_wide())
    room = int(wide * 1.3)
    tried: list[MemoryTried] = []
    jobs = [make_wide(name, steps=10**6) for name in "ab"]
    with wf.Engine(room, threads=1, check=True) as engine:
        engine.subscribe(lambda e: tried.append(e) if isinstance(e, MemoryTried) else None)
        handles = run_until(engine, jobs, tried, 5)
    assert engine.check_races() == []
    report = engine.report()
    assert report.peak_bytes <= room
    assert len({event.limits for event in tried}) >= 2
    for event in tried:
        assert event.jobs == ("a", "b")
        assert sum(event.limits) <= room
        assert min(event.speeds) > 0  # both are in memory
    for job, handle in zip(jobs, handles, strict=True):
        assert handle.result().steps > 0
        fresh = make_wide(job.name, steps=len(handle.losses))
        assert_equal_to_eager(job, handle.result(), fresh)
    speeds = report["a"].memory_speeds
    assert speeds == [(e.limits[0], e.speeds[0]) for e in tried if not e.is_last]
    assert Report.from_json(report.to_json())["a"].memory_speeds == speeds


def test_where_memory_suffices_nothing_is_tried() -> None:
    jobs = [make_wide(name, steps=300) for name in "ab"]
    tried: list[MemoryTried] = []
    with wf.Engine(2 * needed(make_wide()) + 4096, threads=1) as engine:
        engine.subscribe(lambda e: tried.append(e) if isinstance(e, MemoryTried) else None)
        for job in jobs:
            engine.submit(job)
    assert tried == []


def test_who_goes_first_ends_it() -> None:
    """A job that is not opportunistic joins: nothing is tried any more, and it runs at once."""
    wide = needed(make_wide())
    tried: list[MemoryTried] = []
    jobs = [make_wide(name, steps=10**6) for name in "ab"]
    first = make_wide("first", steps=60, priority="normal")
    with wf.Engine(int(wide * 1.3), threads=1) as engine:
        engine.subscribe(lambda e: tried.append(e) if isinstance(e, MemoryTried) else None)
        handles = [engine.submit(job) for job in jobs]
        wait_until(lambda: len(tried) >= 2)
        handle = engine.submit(first)
        assert handle.result(300).state == "finished", handle.result().error
        engine.stop_all()
    assert_equal_to_eager(first, handle.result(), make_wide("first", steps=60))
    for job, one in zip(jobs, handles, strict=True):
        assert_equal_to_eager(job, one.result(), make_wide(job.name, steps=len(one.losses)))
