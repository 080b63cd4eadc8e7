"""Guaranteed, normal and opportunistic jobs: who goes first, who is held back, and the numbers."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.differences import assert_equal_to_eager
from tests.support.tables import soaked
from tests.support.waiting import wait_until
from waterflow.engine import precedence, trains
from waterflow.engine.events import DutyChanged, ShareChanged, SlowdownMeasured
from waterflow.executor.run.lanes import Lanes
from waterflow.partitioner.policies.coordinator import Pace, next_pace
from waterflow.report import summary

pytestmark = pytest.mark.cpu

ENDLESS = 10**9
Heard = TypeVar("Heard")


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int = 6, rows: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    return [
        (
            torch.randn(rows, 24, generator=generator),
            torch.randint(4, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


class Slow:
    """Data that take their time: while they are fetched, their job is idle."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in batches():
            time.sleep(self.seconds)
            yield batch


def make_job(name: str, priority: str = "normal", width: int = 48, **options: Any) -> wf.Job:
    torch.manual_seed(width)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise([24, width, width, width]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"data": batches(), "loss": cross_entropy, "seed": 0, **options}
    return wf.Job(name, model=model, optimizer=optimizer, priority=priority, **settings)


def heard(engine: wf.Engine, kind: type[Heard]) -> list[Heard]:
    """The events of one kind, as they come."""
    events: list[Heard] = []
    engine.subscribe(lambda event: events.append(event) if isinstance(event, kind) else None)
    return events


@pytest.fixture
def no_duty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is beside a guaranteed job harms it, whatever the duty."""
    monkeypatch.setattr(precedence, "Pace", lambda: Pace(0.0))
    monkeypatch.setattr(precedence, "next_pace", lambda pace, *_, **__: pace)


@pytest.mark.parametrize("capture", [True, False, soaked("auto")])
def test_numbers_are_the_loops_whoever_goes_first(capture: Any) -> None:
    def make(priority: str) -> wf.Job:
        width = {"guaranteed": 48, "normal": 32, "opportunistic": 64}[priority]
        return make_job(priority, priority, width, steps=400, capture=capture)

    jobs = [make(priority) for priority in ("opportunistic", "normal", "guaranteed")]
    report = wf.run(jobs, memory="64MiB", threads=1)
    for job in jobs:
        assert_equal_to_eager(job, report.jobs[job.name], make(job.name))


@pytest.mark.parametrize("capture", [True, False])
def test_an_idle_guaranteed_job_leaves_its_time_to_others(capture: bool, no_duty: None) -> None:
    """With a duty of 0 the other job has steps all the same: while the first waits for its data."""

    def make_first() -> wf.Job:
        data = Slow(0.01)
        return make_job("first", "guaranteed", data=data, epochs=5, capture=capture)

    first, other = make_first(), make_job("other", "opportunistic", steps=ENDLESS, capture=capture)
    with wf.Engine("64MiB", threads=1) as engine:
        one, two = engine.submit(first), engine.submit(other)
        one.result(300)
        made = len(two.losses)
        engine.stop_all()
    assert made > 5
    assert_equal_to_eager(first, one.result(), make_first())
    steps = two.result().steps
    assert_equal_to_eager(other, two.result(), make_job("other", steps=steps))


def test_a_held_job_goes_on_once_nobody_goes_before_it(no_duty: None) -> None:
    """The guaranteed job is never idle for long: the other one has what little it leaves, and all
    when it has ended."""
    first = make_job("first", "guaranteed", steps=300, capture=True)
    other = make_job("other", "opportunistic", steps=200, capture=True)
    report = wf.run([first, other], memory="64MiB", threads=1)
    assert report.jobs["first"].losses == wf.run_eager(make_job("first", steps=300)).losses
    assert_equal_to_eager(other, report.jobs["other"], make_job("other", steps=200))


@pytest.mark.timeout(60, method="thread")
def test_nobody_is_held_back_for_a_job_that_waits_for_him(
    no_duty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that needs more memory waits for the others' steps under way."""
    evaluating = threading.Event()
    run_train = Lanes.run_train

    def run_late(lanes: Lanes, lane: int, step: Any, gate: Any, train: Any) -> Any:
        if threading.current_thread() in beside and evaluating.wait(0.02):
            time.sleep(0.2)  # until the memory is asked for
        return run_train(lanes, lane, step, gate, train)

    monkeypatch.setattr(Lanes, "run_train", run_late)
    beside: list[threading.Thread] = []

    def evaluate(model: nn.Module) -> float:
        evaluating.set()
        time.sleep(0.05)  # the other job's next train begins meanwhile
        found = float(torch.ones(1 << 20).sum())
        evaluating.clear()
        return found

    def note(result: wf.StepResult) -> None:
        beside.append(threading.current_thread())

    first = make_job("first", "guaranteed", data=Slow(0.05), epochs=1, capture=True)
    first.evaluate, first.evaluate_every = evaluate, 3
    other = make_job("other", "opportunistic", steps=60, on_step=note, capture=True)
    report = wf.run([first, other], memory="64MiB", threads=1, lanes=2)
    report.raise_errors()
    assert len(report.jobs["first"].evaluations) == 2


def test_a_lane_is_kept_for_the_guaranteed_job() -> None:
    """Two others never take both lanes, as long as it is there."""
    first = make_job("first", "guaranteed", data=Slow(0.004), epochs=20, capture=True)
    others = [make_job(f"other {i}", steps=ENDLESS, width=64, capture=True) for i in range(2)]
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(first)
        wait_until(lambda: len(handle.losses) >= 3)
        for other in others:
            engine.submit(other)
        handle.result(300)
        engine.stop_all()
    spans = engine.report().spans
    begun = spans.start[spans.job == spans.names.index("first")].min()
    last = spans.stop[spans.job == spans.names.index("first")].max()
    mine = [
        (start, stop)
        for start, stop, job in zip(spans.start, spans.stop, spans.job, strict=True)
        if spans.names[job] != "first" and begun < start and stop < last
    ]
    assert len(mine) > 10
    ordered = np.array(sorted(mine))
    assert (ordered[1:, 0] >= ordered[:-1, 1] - 1e-4).all()


def test_who_goes_first_can_be_changed(no_duty: None) -> None:
    """An endless guaranteed job stands aside when it is told to."""
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        changes = heard(engine, ShareChanged)
        one, two = engine.submit(first), engine.submit(other)
        wait_until(lambda: len(one.losses) >= 100 and two.losses)
        one.set_priority("opportunistic")
        two.set_priority("guaranteed")
        two.set_weight(3)
        before = len(two.losses)
        wait_until(lambda: len(two.losses) >= before + 500)
        engine.stop_all()
    assert [(c.job, c.priority, c.weight) for c in changes] == [
        ("first", "opportunistic", 1.0),
        ("other", "guaranteed", 1.0),
        ("other", "guaranteed", 3),
    ]
    for job, handle in ((first, one), (other, two)):
        steps = handle.result().steps
        assert_equal_to_eager(job, handle.result(), make_job(job.name, steps=steps))


def test_who_was_held_and_goes_first_now_is_not_held_any_more(no_duty: None) -> None:
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        one, two = engine.submit(first), engine.submit(other)
        wait_until(lambda: len(one.losses) >= 100 and two.losses)
        two.set_priority("guaranteed")
        one.stop()
        one.result(300)
        before = len(two.losses)
        wait_until(lambda: len(two.losses) >= before + 500)
        engine.stop_all()
    steps = two.result().steps
    assert_equal_to_eager(other, two.result(), make_job("other", steps=steps))


def test_duties_follow_the_rule_and_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is asked with what was measured, and its answers are what others may work."""
    asked: list[tuple[float, float]] = []

    def rule(pace: Pace, slowdown: float, error: float, tolerance: float) -> Pace:
        asked.append((slowdown, error))
        return Pace(0.5 if pace.duty != 0.5 else 0.25)

    monkeypatch.setattr(precedence, "next_pace", rule)
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        told = heard(engine, DutyChanged)
        engine.submit(first)
        engine.submit(other)
        wait_until(lambda: len(told) >= 3)
        engine.stop_all()
    assert [event.duty for event in told[:3]] == [0.5, 0.25, 0.5]
    assert all(event.job == "first" and list(event.others) == ["other"] for event in told)
    assert [(e.slowdown, e.error) for e in told[:3]] == asked[:3]
    throttled = [one for one in engine.report().decisions if one.kind == "throttled"]
    assert [one.job for one in throttled] == ["other"] * len(told)
    assert all(-1 < slowdown < math.inf and 0 <= error < math.inf for slowdown, error in asked)


@pytest.mark.parametrize("strangers", [False, True])
def test_a_pace_outlives_suspension(strangers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a guaranteed job has shown beside others is known when it comes back. Where all of them
    are others by then, how far they go stays, as it did no harm at once; what did is forgotten."""
    asked: list[Pace] = []
    learnt = Pace(0.375, 0.375, 0.75, calm=1, failures=3)

    def rule(pace: Pace, slowdown: float, error: float, tolerance: float) -> Pace:
        asked.append(pace)
        return learnt

    monkeypatch.setattr(precedence, "next_pace", rule)

    def make(name: str) -> wf.Job:
        priority = "guaranteed" if name.startswith("first") else "opportunistic"
        return make_job(name, priority, steps=ENDLESS, capture=True)

    with wf.Engine("64MiB", threads=1) as engine:
        first, other = engine.submit(make("first")), engine.submit(make("other"))
        wait_until(lambda: asked)
        assert first.suspend(timeout=300)
        before = len(other.losses)
        wait_until(lambda: len(other.losses) >= before + 50)  # it is not held back meanwhile
        stays = engine.submit(make("first to stay")) if strangers else None
        if stays is not None:
            other.stop()
            other.result(300)
            other = engine.submit(make("another"))
            wait_until(lambda: stays.losses and other.losses)
            stays.stop()
            stays.result(300)
        asked.clear()
        first.resume()
        wait_until(lambda: asked)
        engine.stop_all()
    assert asked[0] == (Pace(0.375) if strangers else learnt)


@pytest.mark.parametrize("priority", ["high", None, 1])
def test_a_priority_that_is_none(priority: Any) -> None:
    with pytest.raises(wf.JobError, match=r"job 'a': priority must be one of 'guaranteed', "):
        make_job("a", priority)


def test_bad_changes_are_refused() -> None:
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(make_job("a", steps=3))
        with pytest.raises(wf.JobError, match=r"job 'a': priority must be one of .*, got 'low'"):
            handle.set_priority("low")
        with pytest.raises(wf.JobError, match=r"job 'a': weight must be a number above 0, got 0"):
            handle.set_weight(0)


def test_priorities_need_a_policy_that_knows_them() -> None:
    job = make_job("a", "guaranteed", steps=3)
    with pytest.raises(wf.JobError, match=r"job 'a': priority='guaranteed' .*use policy='flow'"):
        wf.run([job], memory="64MiB", policy="temporal")


def test_steps_that_begin_an_epoch_are_compared_with_such(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[int] = []

    def noted(*arguments: Any, first_kind: int, make: Any = trains._C.Train, **options: Any) -> Any:
        kinds.append(first_kind)
        return make(*arguments, first_kind=first_kind, **options)

    monkeypatch.setattr(trains._C, "Train", noted)
    job = make_job("a", data=batches(100), epochs=4, capture=True)
    wf.run([job], memory="64MiB", threads=1)
    assert 3 <= kinds.count(2) <= 8  # an epoch each, and where lanes begin anew
    assert set(kinds) == {1, 2}


def test_what_a_guaranteed_job_loses_is_measured_and_told() -> None:
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        measured = heard(engine, SlowdownMeasured)
        engine.submit(first)
        engine.submit(other)
        wait_until(lambda: len(measured) >= 2)
        engine.stop_all()
    report = engine.report()
    found = report.jobs["first"].slowdown
    assert found is not None
    assert {(one.job, *one.others) for one in measured} == {("first", "other")}
    seconds = sum(one.seconds for one in measured)
    assert found.seconds == pytest.approx(seconds)
    mean = sum(one.seconds * one.slowdown for one in measured) / seconds
    assert found.mean == pytest.approx(mean)
    assert f"first: {found.describe()}" in summary.remarks(report)
    assert report.jobs["other"].slowdown is None


def test_what_is_tolerated_is_the_jobs_own_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it loses, others are not held back where it says so."""
    asked: list[float] = []

    def rule(pace: Pace, slowdown: float, error: float, tolerance: float) -> Pace:
        asked.append(tolerance)
        return next_pace(pace, 0.5, error, tolerance)

    monkeypatch.setattr(precedence, "next_pace", rule)
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True, max_slowdown=math.inf)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        told = heard(engine, DutyChanged)
        engine.submit(first)
        engine.submit(other)
        wait_until(lambda: any(event.duty == 1.0 for event in told))
        engine.stop_all()
    assert set(asked) == {math.inf}
    duties = [event.duty for event in told]
    assert duties == sorted(duties)


def test_what_is_tolerated_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did harm by the former measure is found out anew, at the duty that there is."""
    asked: list[tuple[float, Pace]] = []
    learnt = Pace(0.375, 0.375, 0.75, calm=1, failures=3)

    def rule(pace: Pace, slowdown: float, error: float, tolerance: float) -> Pace:
        asked.append((tolerance, pace))
        return learnt

    monkeypatch.setattr(precedence, "next_pace", rule)
    first = make_job("first", "guaranteed", steps=ENDLESS, capture=True)
    other = make_job("other", "opportunistic", steps=ENDLESS, capture=True)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(first)
        engine.submit(other)
        wait_until(lambda: len(asked) >= 2)
        assert asked[1] == (0.01, learnt)
        handle.set_max_slowdown(0.2)
        wait_until(lambda: asked[-1][0] == 0.2)
        with pytest.raises(wf.JobError, match=r"job 'first': max_slowdown must be a number above"):
            handle.set_max_slowdown(-1)
        engine.stop_all()
    assert next(pace for tolerance, pace in asked if tolerance == 0.2) == Pace(0.375)
    told = [decision.what for decision in engine.report().decisions if decision.job == "first"]
    assert "guaranteed, weight 1, at most 20% slower than alone" in told


@pytest.mark.parametrize("capture", [True, False])
def test_tiny_steps_beside_a_guaranteed_job_do_not_stop_it(capture: bool) -> None:
    """Steps so short that they keep the interpreter's lock are held like all others, and whoever
    holds them needs that lock himself."""

    def make(name: str, priority: str) -> wf.Job:
        return make_job(name, priority, width=4, data=batches(200, 2), steps=6000, capture=capture)

    jobs = [make("first", "guaranteed"), make("other", "opportunistic")]
    report = wf.run(jobs, memory="64MiB", threads=1)
    for job in jobs:
        assert_equal_to_eager(job, report.jobs[job.name], make(job.name, "normal"))


@pytest.mark.parametrize("wrong", [0, -0.1, math.nan, "1%", None, True])
def test_a_largest_slowdown_that_is_none(wrong: Any) -> None:
    with pytest.raises(wf.JobError, match=r"job 'a': max_slowdown must be a number above 0"):
        make_job("a", "guaranteed", max_slowdown=wrong)
