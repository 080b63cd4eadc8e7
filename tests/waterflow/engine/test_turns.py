"""More jobs than fit take turns in memory, with the loop's numbers and a fair share of the time."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.support.tables import soaked
from tests.support.waiting import wait_until
from tests.waterflow.engine.test_suspension import assert_equal_to_eager, make_job, needed
from waterflow.engine.events import MemoryMoved

pytestmark = pytest.mark.cpu


class InMemory:
    """Jobs that are in memory, and the seconds that each has been; subscribes to events."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.seconds = Counter[str]()
        self.most = 0  # at a time

    def __call__(self, event: Any) -> None:
        if not isinstance(event, MemoryMoved):
            return
        if event.held:
            self._since.setdefault(event.job, time.perf_counter())
            self.most = max(self.most, len(self._since))
        elif event.job in self._since:
            self.seconds[event.job] += time.perf_counter() - self._since.pop(event.job)

    def begin(self) -> None:
        """Forgets what was before."""
        self.seconds.clear()
        self.most = len(self._since)
        self._since = dict.fromkeys(self._since, time.perf_counter())


@pytest.mark.parametrize("capture", [True, soaked("auto")])
def test_jobs_that_do_not_fit_together_take_turns(capture: Any) -> None:
    """Each is in memory more than once, and no more than one at a time."""
    room = needed(make_job("a", 1, capture=True))
    jobs = [make_job(name, 1, epochs=20, capture=capture) for name in "abc"]
    inside: list[tuple[str, int]] = []
    with wf.Engine(room, policy="time-slice", quantum="100ms", threads=1) as engine:
        engine.subscribe(
            lambda event: (
                inside.append((event.job, event.held)) if isinstance(event, MemoryMoved) else None
            )
        )
        handles = [engine.submit(job) for job in jobs]
    comings = [name for name, held in inside if held]
    assert len(set(comings[:3])) == 3  # the first turns are everybody's
    assert len(comings) > 3
    assert engine.report().peak_bytes <= room
    for job, handle in zip(jobs, handles, strict=True):
        assert handle.status == "finished"
        assert_equal_to_eager(job, handle.result(), make_job(job.name, 1, epochs=20))


def test_a_smaller_budget_lets_fewer_in_at_a_time() -> None:
    """Jobs that take turns need not all stay in memory; one that would have no turn is refused."""
    room = needed(make_job("a", 1, capture=True))
    jobs = [make_job(name, 1, epochs=30, capture=True) for name in "abc"]
    inside = InMemory()
    with wf.Engine(4 * room, policy="time-slice", quantum="50ms", threads=1) as engine:
        engine.subscribe(inside)
        handles = [engine.submit(job) for job in jobs]
        wait_until(lambda: all(handle.losses for handle in handles))
        with pytest.raises(wf.BudgetError, match=r"'a' holds .* and needs .* for a step"):
            engine.resize(room // 2)
        assert inside.most == 3
        engine.resize(room)
        inside.most = 0
        steps = [len(handle.losses) for handle in handles]
        wait_until(lambda: all(len(h.losses) > n for h, n in zip(handles, steps, strict=True)))
        assert inside.most == 1
        engine.resize(4 * room)
    for job, handle in zip(jobs, handles, strict=True):
        assert_equal_to_eager(job, handle.result(), make_job(job.name, 1, epochs=30))


def test_a_weight_that_is_changed_counts_from_then_on() -> None:
    room = needed(make_job("a", 1, capture=True))
    jobs = [make_job(name, 1, epochs=10**6, capture=True) for name in "ab"]
    inside = InMemory()
    with wf.Engine(room, policy="time-slice", quantum="50ms", threads=1) as engine:
        engine.subscribe(inside)
        handles = [engine.submit(job) for job in jobs]
        wait_until(lambda: all(handle.losses for handle in handles))
        handles[0].set_weight(4)
        inside.begin()
        time.sleep(1.5)
        engine.stop_all()
    assert 0.65 < inside.seconds["a"] / inside.seconds.total() < 0.95


@pytest.mark.parametrize("away", [False, True], ids=["nobody waited", "one was suspended"])
def test_time_in_which_a_job_wanted_no_turn_gives_it_none(away: bool) -> None:
    """Neither a job that was in memory while nobody waited, nor one that rested for its user's
    sake, is owed that time."""
    room = needed(make_job("a", 1, capture=True))
    jobs = [make_job(name, 1, epochs=10**6, capture=True) for name in "ab"]
    inside = InMemory()
    with wf.Engine(2 * room, policy="time-slice", quantum="50ms", threads=1) as engine:
        engine.subscribe(inside)
        handles = [engine.submit(job) for job in jobs]
        wait_until(lambda: all(handle.losses for handle in handles))
        engine.resize(room)  # turns begin, so that time counts
        time.sleep(0.3)
        engine.resize(2 * room)
        if away:
            assert handles[1].suspend(timeout=300)
        time.sleep(3.0)
        engine.resize(room)
        handles[1].resume()
        before = len(handles[1].losses)
        wait_until(lambda: len(handles[1].losses) > before)
        inside.begin()
        time.sleep(2.0)  # long beside what a turn overruns on a busy machine
        engine.stop_all()
    share = inside.seconds["b"] / inside.seconds.total()
    assert 0.25 < share < 0.75


def test_a_job_that_somebody_suspended_has_no_turn() -> None:
    room = needed(make_job("a", 1, capture=True))
    jobs = [make_job(name, 1, epochs=8) for name in "ab"]
    with wf.Engine(room, policy="time-slice", quantum=0.05, threads=1) as engine:
        one, other = (engine.submit(job) for job in jobs)
        assert one.suspend(timeout=300)
        before = len(one.losses)
        assert other.result(300).state == "finished"
        time.sleep(0.2)
        assert len(one.losses) == before
        assert one.status == "suspended"
        one.resume()
    for job, handle in zip(jobs, (one, other), strict=True):
        assert_equal_to_eager(job, handle.result(), make_job(job.name, 1, epochs=8))


def test_a_weight_is_a_share_of_the_time_in_memory() -> None:
    room = needed(make_job("a", 1, capture=True))
    jobs = [
        make_job("heavy", 1, epochs=10**6, weight=3.0, capture=True),
        make_job("light", 1, epochs=10**6, capture=True),
    ]
    turns = Counter[str]()

    def count(event: Any) -> None:
        if isinstance(event, MemoryMoved) and event.held:
            turns[event.job] += 1

    with wf.Engine(room, policy="time-slice", quantum=0.1, threads=1) as engine:
        engine.subscribe(count)
        heavy, light = (engine.submit(job) for job in jobs)
        wait_until(lambda: len(light.losses) >= 100)
        a, b, before = len(heavy.losses), len(light.losses), turns["light"]
        wait_until(lambda: turns["light"] >= before + 8)
        a, b = len(heavy.losses) - a, len(light.losses) - b
        engine.stop_all()
    assert 1.5 < a / b < 6


@pytest.mark.parametrize("options", [{"policy": "flow", "quantum": 1}, {"quantum": "1s"}])
def test_a_quantum_needs_its_policy(options: dict[str, Any]) -> None:
    with pytest.raises(wf.JobError, match=r"quantum=.* is for policy='time-slice', got"):
        wf.run([make_job("a")], memory="64MiB", **options)


def test_all_fit_and_nobody_leaves() -> None:
    torch.manual_seed(0)
    jobs = [make_job(name, 1) for name in "ab"]
    report = wf.run(jobs, memory="64MiB", policy="time-slice", quantum=0.01, threads=1)
    for job in jobs:
        assert_equal_to_eager(job, report.jobs[job.name], make_job(job.name, 1))
