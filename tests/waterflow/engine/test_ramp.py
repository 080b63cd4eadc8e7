"""Hundreds of jobs: they begin a few at a time, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import waterflow as wf
from tests.support.data import pairs
from tests.support.differences import assert_equal_to_eager
from tests.support.engine_parts import make_job
from tests.support.needs import needed
from tests.support.shared_objects import Criterion
from tests.support.shared_objects import job as shares_criterion
from tests.support.waiting import wait_until
from waterflow.engine import job_queue
from waterflow.engine.events import EagerStepBegun, Event, StateChanged
from waterflow.engine.states import JobState
from waterflow.partitioner.policies.flow import Flow

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

MEMORY = "256MiB"
MOST_PREPARED = 8
MANY = 30
ENDLESS = 10**9


@pytest.fixture(autouse=True)
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "_MOST_PREPARED", MOST_PREPARED)


class Ahead:
    """The jobs that are prepared and have not begun, and how many there were at most."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self.most = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StateChanged) and event.after is JobState.PREPARING:
            self._jobs.add(event.job)
        elif isinstance(event, EagerStepBegun):
            self._jobs.discard(event.job)
        self.most = max(self.most, len(self._jobs))


class UntilAll:
    """A callback that ends its job once as many jobs as there are have made a step."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun: set[str] = set()

    def of(self, name: str) -> Any:
        def on_step(step: wf.StepResult) -> Any:
            self._begun.add(name)
            return wf.STOP if len(self._begun) == self._count else None

        return on_step


@pytest.mark.parametrize("capture", ["auto", True, False])
def test_hundreds_of_jobs_train_as_their_loops_do(capture: Any) -> None:
    jobs = [make_job(f"job-{n}", 4 + n % 3, capture=capture) for n in range(MANY)]
    ahead = Ahead()
    with wf.Engine(MEMORY, threads=1) as engine:
        engine.subscribe(ahead)
        for job in jobs:
            engine.submit(job)
    report = engine.report()
    for n, job in enumerate(jobs):
        assert_equal_to_eager(job, report[job.name], make_job(job.name, 4 + n % 3))
    assert ahead.most <= MOST_PREPARED


@pytest.mark.parametrize("policy", ["flow", "temporal"])
def test_long_jobs_are_all_together_within_moments(policy: str) -> None:
    until = UntilAll(MANY)
    jobs = [make_job(f"job-{n}", steps=ENDLESS, on_step=until.of(f"job-{n}")) for n in range(MANY)]
    report = wf.run(jobs, MEMORY, threads=1, policy=policy)
    assert all(job.state == "stopped" for job in report)


def test_a_guaranteed_job_goes_before_hundreds_that_came_before_it() -> None:
    others = [make_job(f"job-{n}", steps=ENDLESS, priority="opportunistic") for n in range(MANY)]
    with wf.Engine(MEMORY, threads=1) as engine:
        for job in others:
            engine.submit(job)
        first = engine.submit(make_job("first", priority="guaranteed"))
        assert first.result().state == "finished"
        engine.stop_all()


def test_a_job_that_is_given_a_higher_priority_waits_behind_nobody() -> None:
    with wf.Engine(MEMORY, threads=1) as engine:
        engine.hold()
        for n in range(MANY):
            engine.submit(make_job(f"job-{n}", steps=ENDLESS))
        last = engine.submit(make_job("last"))
        last.set_priority("guaranteed")
        engine.release()
        assert last.result().state == "finished"
        engine.stop_all()


def test_a_job_that_is_stopped_while_it_waits_never_begins() -> None:
    asked: list[str] = []

    class Data:
        def __iter__(self) -> Iterator[Any]:
            asked.append("last")
            return iter(pairs())

    with wf.Engine(MEMORY, threads=1) as engine:
        engine.hold()
        others = [engine.submit(make_job(f"job-{n}")) for n in range(MANY)]
        last = engine.submit(make_job("last", data=Data()))
        last.stop()
        assert last.result(timeout=60).state == "stopped"
        engine.release()
        assert all(other.result().state == "finished" for other in others)
    assert asked == []


def test_a_job_that_is_to_rest_while_it_waits_does_so_and_goes_on_later() -> None:
    with wf.Engine(MEMORY, threads=1) as engine:
        others = [engine.submit(make_job(f"job-{n}", steps=ENDLESS)) for n in range(MANY)]
        last = engine.submit(make_job("last"))
        assert last.suspend(timeout=60)
        last.resume()
        assert last.result(timeout=60).state == "finished"
        for other in others:
            other.stop()


def test_who_has_begun_and_waits_for_data_keeps_nobody_from_beginning() -> None:
    released = threading.Event()

    class Data:
        def __init__(self, batches: int) -> None:
            self._batches = batches

        def __iter__(self) -> Iterator[Any]:
            yield from (pairs() * 4)[: self._batches]
            assert released.wait(60)

    slow = [make_job(f"slow-{n}", steps=4, data=Data(n % 3)) for n in range(12)]
    quick = [make_job(f"quick-{n}") for n in range(40)]
    with wf.Engine(MEMORY, threads=1) as engine:
        for job in slow:
            engine.submit(job)
        handles = [engine.submit(job) for job in quick]
        try:
            assert all(handle.result(timeout=60).state == "finished" for handle in handles)
        finally:
            released.set()
            engine.stop_all()


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_jobs_that_share_something_train_in_the_order_of_their_submission() -> None:
    ended: list[str] = []
    one = Criterion()

    def note(event: Event) -> None:
        if isinstance(event, StateChanged) and event.after.ended and event.job in "abc":
            ended.append(event.job)

    with wf.Engine(MEMORY, threads=1) as engine:
        engine.subscribe(note)
        engine.hold()
        for n in range(MANY):
            engine.submit(make_job(f"job-{n}"))
        for name, priority in (("a", "normal"), ("b", "guaranteed"), ("c", "normal")):
            shares = shares_criterion(loss=one, priority=priority)
            shares.name = name
            engine.submit(shares)
        engine.release()
    assert ended == ["a", "b", "c"]
    assert engine.report().ok


def test_shared_data_are_not_made_for_each_of_many() -> None:
    made: list[int] = []

    class Data:
        def __iter__(self) -> Iterator[Any]:
            for n, pair in enumerate(pairs() * 50):
                made.append(n)
                time.sleep(0.002)
                yield pair

    data = wf.shared(Data(), seed=0)
    jobs = [make_job(f"job-{n}", data=data, steps=100) for n in range(MANY)]
    report = wf.run(jobs, MEMORY, threads=1)
    assert report.ok
    assert len(made) < 100 * MANY / 2


def test_of_hundreds_one_that_is_too_large_fails_alone_when_its_turn_has_come() -> None:
    need = needed(make_job("large", 512))
    assert need > 2 * needed(make_job("small"))
    jobs = [make_job(f"job-{n}") for n in range(MANY)]
    report = wf.run([*jobs, make_job("large", 512)], need - 1, threads=1)
    failed = [job for job in report if job.error is not None]
    assert [job.name for job in failed] == ["large"]
    assert isinstance(failed[0].exception, wf.BudgetError)
    with pytest.raises(wf.BudgetError, match="'large' needs"):
        wf.run([make_job("job"), make_job("large", 512)], need - 1, threads=1)


def test_jobs_that_wait_know_of_a_budget_that_has_changed() -> None:
    need = needed(make_job("job"))
    with wf.Engine(4 * need, threads=1) as engine:
        engine.hold()
        jobs = [make_job(f"job-{n}", steps=50) for n in range(MANY)]
        handles = [engine.submit(job) for job in jobs]
        engine.resize(2 * need)
        engine.release()
        assert all(handle.result().state == "finished" for handle in handles)
    assert engine.report().peak_bytes <= 2 * need


def test_an_engine_is_over_only_when_those_who_wait_have_trained() -> None:
    with wf.Engine(MEMORY, threads=1) as engine:
        for n in range(MANY):
            engine.submit(make_job(f"job-{n}", steps=1))
        engine.close()
    states = [job.state for job in engine.report()]
    assert states == ["finished"] * MANY
    wait_until(
        lambda: not any(t.name.startswith("waterflow-data-job") for t in threading.enumerate()), 10
    )


def test_those_who_rest_before_they_have_begun_keep_nobody_from_beginning() -> None:
    with wf.Engine(MEMORY, threads=1) as engine:
        engine.hold()
        resting = [engine.submit(make_job(f"rests-{n}")) for n in range(MOST_PREPARED + 2)]
        assert all(handle.suspend(timeout=60) for handle in resting)
        going = [engine.submit(make_job(f"goes-{n}")) for n in range(MANY)]
        engine.release()
        assert all(handle.result(timeout=60).state == "finished" for handle in going)
    assert all(handle.result().state == "finished" for handle in resting)


def test_an_engine_that_breaks_ends_those_who_wait_too() -> None:
    class Broken(Flow):
        def next_job(self, shares: Any) -> int:
            raise LookupError("nobody is next")

    engine = wf.Engine(MEMORY, threads=1, policy=Broken())
    engine.hold()
    handles = [engine.submit(make_job(f"job-{n}")) for n in range(MANY)]
    with pytest.raises(LookupError, match="nobody is next"):
        engine.close()
    for handle in handles:
        assert handle.result(timeout=60).state == "failed"
