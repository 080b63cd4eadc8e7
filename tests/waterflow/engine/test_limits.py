"""Limits changed while jobs run: held from then on, nobody's numbers touched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.tables import crossed
from tests.support.waiting import wait_until
from tests.waterflow.engine.test_suspension import (
    Stops,
    assert_equal_to_eager,
    cross_entropy,
    make_job,
    needed,
)
from waterflow.engine.events import BudgetChanged, MemoryLent

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("policy", ["flow", "temporal"])
def test_smaller_and_larger_while_jobs_run(policy: str) -> None:
    stops = Stops(4, 9, 14)
    jobs = [make_job("a", 1, on_step=stops, capture=True), make_job("b", 2, capture=True)]
    room = 2 * sum(
        needed(make_job(name, seed, capture=True)) for name, seed in (("a", 1), ("b", 2))
    )
    budgets: list[int] = []
    with wf.Engine(room, policy=policy, threads=1) as engine:
        engine.subscribe(
            lambda e: budgets.append(e.budget) if isinstance(e, BudgetChanged) else None
        )
        handles = [engine.submit(job) for job in jobs]
        for step, budget in ((4, room // 2), (9, room // 2 + 4096), (14, 4 * room)):
            with stops.at(step):
                asked = threading.Thread(target=engine.resize, args=(budget,))
                asked.start()
            asked.join(300)
            assert engine.budget == budget
            if budget < room:
                assert engine._arena.statistics().capacity <= budget
        assert [handle.result(300).state for handle in handles] == ["finished"] * 2
    assert budgets == [room // 2, room // 2 + 4096, 4 * room]
    for job, handle, seed in zip(jobs, handles, (1, 2), strict=True):
        assert_equal_to_eager(job, handle.result(), make_job(job.name, seed))


def test_a_budget_that_is_too_small_is_refused_by_name_and_changes_nothing() -> None:
    stops = Stops(3)
    job = make_job("a", 1, on_step=stops, capture=True)
    errors: list[Exception] = []

    def shrink() -> None:
        try:
            engine.resize("1KiB")
        except wf.BudgetError as error:
            errors.append(error)

    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        with stops.at(3):
            asked = threading.Thread(target=shrink)
            asked.start()
        asked.join(300)
        assert engine.budget == 64 << 20
    assert "cannot become 1024 bytes (1.0 KiB): 'a' holds" in str(errors[0])
    assert_equal_to_eager(job, handle.result(), make_job("a", 1))


def test_opportunistic_jobs_make_room_and_come_back() -> None:
    stops = Stops(3, 8)
    first = make_job("first", 2, on_step=stops, capture=True, priority="guaranteed")
    other = make_job("other", 1, epochs=40, capture=True, priority="opportunistic")
    room = needed(make_job("first", 2, capture=True))
    with wf.Engine("64MiB", threads=1) as engine:
        engine.hold()  # until both may begin: while one is in a callback, nobody is let in
        one, two = engine.submit(first), engine.submit(other)
        engine.release()
        with stops.at(3):
            wait_until(lambda: two.losses)
            asked = threading.Thread(target=engine.resize, args=(room,))
            asked.start()
        asked.join(300)
        wait_until(lambda: two.status == "suspended")  # the engine's thread goes on to that
        made = len(two.losses)
        with stops.at(8):
            assert len(two.losses) == made
            asked = threading.Thread(target=engine.resize, args=("64MiB",))
            asked.start()
        asked.join(300)
        assert two.result(300).state == "finished"
    assert_equal_to_eager(first, one.result(), make_job("first", 2))
    assert_equal_to_eager(other, two.result(), make_job("other", 1, epochs=40))


ROOM_FOR_NOBODY = 16 << 10


@pytest.mark.parametrize(
    ("policy", "capture"), crossed(["flow", "time-slice"], [False, "auto", True])
)
def test_a_job_under_whose_need_the_budget_falls_rests_until_there_is_more(
    policy: str, capture: Any
) -> None:
    """Also where it is the only one, and where others have not begun yet."""
    stops = Stops(5)
    options: dict[str, Any] = {"capture": capture, "priority": "opportunistic", "epochs": 40}
    job, later = make_job("a", 1, on_step=stops, **options), make_job("b", 2, **options)
    with wf.Engine("64MiB", policy=policy, threads=1) as engine:
        handle = engine.submit(job)
        with stops.at(5):
            resize = in_thread(lambda: engine.resize(ROOM_FOR_NOBODY))
        resize.join(300)
        wait_until(lambda: handle.status == "suspended")
        assert engine.budget == ROOM_FOR_NOBODY
        made = len(handle.losses)
        handle.suspend()  # that others wish it to rest changes nothing
        handle.resume()
        refused = engine.submit(later)  # it has not known another budget
        assert isinstance(refused.result(300).exception, (wf.BudgetError, torch.OutOfMemoryError))
        assert (handle.status, len(handle.losses)) == ("suspended", made)
        engine.resize("64MiB")
        assert handle.result(300).state == "finished"
    assert_equal_to_eager(job, handle.result(), make_job("a", 1, epochs=40))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("policy", ["flow", "time-slice"])
def test_who_waits_for_a_budget_that_nobody_can_give_ends_with_what_it_needs(
    policy: str, begins: bool
) -> None:
    stops = Stops(5)
    options: dict[str, Any] = {"priority": "opportunistic", "epochs": 40}
    job = make_job("a", 1, on_step=stops, **options)
    with wf.Engine("64MiB", policy=policy, threads=1) as engine:
        if not begins:
            engine.hold()
        handle = engine.submit(job)
        with stops.at(5) if begins else contextlib.nullcontext():
            resize = in_thread(lambda: engine.resize(ROOM_FOR_NOBODY))
        resize.join(300)
        if begins:
            wait_until(lambda: handle.status == "suspended")
    error = handle.result().exception
    assert isinstance(error, wf.BudgetError)
    assert "job 'a' needs" in str(error)
    assert f"the budget is {ROOM_FOR_NOBODY} bytes" in str(error)
    assert len(handle.losses) == (5 if begins else 0)


def test_in_a_callback_it_does_not_wait_for_itself() -> None:
    def shrink(result: wf.StepResult) -> None:
        if result.step == 3:
            engine.resize("32MiB")

    job = make_job("a", 1, on_step=shrink)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        handle.result(300)
        assert engine.budget == 32 << 20
    assert_equal_to_eager(job, handle.result(), make_job("a", 1))


@pytest.mark.parametrize("memory", ["plenty", -1, 0])
def test_what_is_no_budget(memory: Any) -> None:
    with wf.Engine("64MiB", threads=1) as engine, pytest.raises(wf.JobError):
        engine.resize(memory)


def test_an_engine_that_has_ended_has_no_budget() -> None:
    with wf.Engine("64MiB", threads=1) as engine:
        pass
    with pytest.raises(wf.JobError, match="the engine has ended"):
        engine.resize("32MiB")


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_what_is_given_up_is_the_systems_at_once() -> None:
    """A quarter of a gigabyte that a step has touched."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        wide = model(batch).sum() + torch.ones(1 << 26)
        return wide.mean()

    stops = Stops(3)
    job = wf.Job(
        "a",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=loss,
        data=[torch.randn(4, 8)],
        steps=4,
        on_step=stops,
        capture=True,
    )
    with wf.Engine("2GiB", threads=1) as engine:
        handle = engine.submit(job)
        with stops.at(3):
            before = resident_bytes()
            handle.suspend()
        assert handle.suspend(300)
        engine.resize("1MiB")
        assert before - resident_bytes() > 200 << 20
        engine.resize("2GiB")
        handle.resume()
        assert handle.result(300).state == "finished"


# Of one job


def make_deep(name: str, **options: Any) -> wf.Job:
    """A perceptron whose activations are most of what it needs."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(512, 64, generator=generator) for _ in range(4)]
    data = [(one, torch.randint(10, (512,), generator=generator)) for one in rows]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    settings: dict[str, Any] = {"data": data, "steps": 40, "seed": 0, "capture": True, **options}
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize(("policy", "capture"), crossed(["flow", "temporal"], [True, "auto"]))
def test_a_limit_under_what_a_job_needs_and_none_again(policy: str, capture: Any) -> None:
    stops = Stops(6, 20)
    need = needed(make_deep("a"))
    job, beside = make_deep("a", on_step=stops, capture=capture), make_job("b", 1, capture=True)
    with wf.Engine("64MiB", policy=policy, threads=1) as engine:
        handle, other = engine.submit(job), engine.submit(beside)
        run = handle._job
        with stops.at(6):
            asked = in_thread(lambda: handle.set_memory_limit(need * 7 // 10))
        asked.join(300)
        with stops.at(20):
            assert run.needs.memory.alone_bytes <= need * 7 // 10
            assert run.steps.spiller.is_needed
            asked = in_thread(lambda: handle.set_memory_limit(None))
        asked.join(300)
        assert handle.result(300).state == other.result(300).state == "finished"
        assert not run.steps.spiller.is_needed
    assert_equal_to_eager(job, handle.result(), make_deep("a"))
    assert_equal_to_eager(beside, other.result(), make_job("b", 1))
    decided = [decision for decision in engine.report().decisions if decision.job == "a"]
    assert "spilled" in {decision.kind for decision in decided}
    said = [decision.what for decision in decided if decision.what.startswith("its limit")]
    assert said[0].startswith("its limit is ")
    assert said[-1] == "its limit is none"


def test_the_memory_of_steps_keeps_to_the_limit() -> None:
    """As the arena counts it, from the moment at which the limit holds."""
    stops = Stops(6, 20)
    need = needed(make_deep("a"))
    limit = need * 6 // 10
    job = make_deep("a", on_step=stops)
    with wf.Engine("64MiB", threads=1, check=True) as engine:
        handle = engine.submit(job)
        with stops.at(6):
            asked = in_thread(lambda: handle.set_memory_limit(limit))
        asked.join(300)
        with stops.at(20):
            engine._arena.reset_peaks()
        handle.result(300)
        assert engine._arena.statistics().peak <= limit
    assert engine.check_races() == []
    assert_equal_to_eager(job, handle.result(), make_deep("a"))


def test_limits_that_cannot_be_are_refused_and_change_nothing() -> None:
    stops = Stops(6)
    job = make_deep("a", on_step=stops)
    opaque = make_deep("opaque", capture=False, steps=400)
    errors: list[Exception] = []

    def ask(handle: wf.JobHandle, memory: str) -> None:
        try:
            handle.set_memory_limit(memory)
        except (wf.BudgetError, wf.JobError) as error:
            errors.append(error)

    with wf.Engine("64MiB", threads=1) as engine:
        handle, other = engine.submit(job), engine.submit(opaque)
        with stops.at(6):
            asked = in_thread(lambda: (ask(handle, "4KiB"), ask(other, "4KiB"))[0])
        asked.join(300)
        handle.result(300)
        ask(handle, "32MiB")
    assert "job 'a': its step cannot be planned into 4096 bytes" in str(errors[0])
    assert "job 'opaque': memory_limit=4096 cannot be kept" in str(errors[1])
    assert "job 'a' is finished and has no limit any more" in str(errors[2])
    assert_equal_to_eager(job, handle.result(), make_deep("a"))
    assert_equal_to_eager(opaque, other.result(), make_deep("opaque", steps=400))


def peak_of(job: wf.Job) -> int:
    """The bytes of the arena that a job has at most."""
    with wf.Engine("64MiB", threads=1) as engine:
        return engine.submit(job).result(300).peak_bytes


def with_radam(**options: Any) -> wf.Job:
    """A job whose optimizer runs as eager Python behind a captured pass."""
    job = make_deep("a", **options)
    job.optimizer = torch.optim.RAdam(job.model.parameters(), 0.01)
    return job


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
def test_what_an_eager_optimizer_takes_does_not_grow_with_the_budget() -> None:
    """Room set aside for eager steps was once taken for what such a step needs, and grew."""
    reports = [wf.run([with_radam(epochs=4)], budget) for budget in ("8MiB", "64MiB")]
    peaks = [report["a"].peak_bytes for report in reports]
    assert peaks[0] == peaks[1] <= peak_of(make_deep("a", capture=True)) * 1.5


@pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning")
@pytest.mark.parametrize("make", [partial(make_deep, "a", capture=False), with_radam])
@pytest.mark.parametrize("beside", [False, True])
def test_eager_python_keeps_to_a_limit(make: Callable[..., wf.Job], beside: bool) -> None:
    need = peak_of(make())
    others = [make_deep("other")] if beside else []
    states = []
    for limit in (need, need // 2, need // 4, need // 8):
        job = make(memory_limit=limit)
        report = wf.run([job, *others], "64MiB", threads=1)
        states.append(report["a"].state)
        assert report["a"].peak_bytes <= limit
        assert all(report[other.name].ok for other in others)
        if report["a"].ok:
            assert_equal_to_eager(job, report["a"], make())
        else:
            assert "runs as eager Python, which cannot" in report["a"].error or (
                f"its memory_limit is {limit} bytes" in report["a"].error
                and "cannot be spilled, since they run as eager Python" in report["a"].error
            )
    assert states[0] == "finished"
    assert {*states[1:]} - {"finished"}


def test_nobody_rests_for_a_job_that_meets_its_own_limit() -> None:
    """In the middle of its steps, beside an opportunistic job's."""
    rows, labels = make_deep("a").data[0]
    data = [(rows[:32], labels[:32])] * 20 + [(rows, labels)]
    settings = {"capture": False, "data": data, "steps": 21}
    limit = peak_of(make_deep("a", **settings)) // 2
    heard: list[Any] = []
    job = make_deep("a", memory_limit=limit, **settings)
    other = make_deep("other", priority="opportunistic", steps=400)
    with wf.Engine("64MiB", threads=1) as engine:
        engine.subscribe(heard.append)
        there = engine.submit(other)
        wait_until(lambda: len(there.losses) > 2)
        ended = engine.submit(job).result(300)
        assert (ended.state, ended.steps) == ("out_of_memory", 20)
        assert there.result(300).ok
    assert not [event for event in heard if isinstance(event, MemoryLent)]
    assert_equal_to_eager(other, there.result(), make_deep("other", steps=400))


def test_the_limit_of_eager_python_is_changed_while_it_runs() -> None:
    stops = Stops(6, 12)
    need = peak_of(make_deep("a", capture=False))
    job = make_deep("a", capture=False, on_step=stops)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        for step, limit in ((6, 2 * need), (12, None)):
            with stops.at(step):
                asked = in_thread(lambda limit=limit: handle.set_memory_limit(limit))
            asked.join(300)
        assert handle.result(300).ok
    assert_equal_to_eager(job, handle.result(), make_deep("a", capture=False))


def test_jobs_that_may_spill_follow_a_smaller_budget() -> None:
    stops = Stops(6, 20)
    need = needed(make_deep("a"))
    job = make_deep("a", on_step=stops)
    with wf.Engine("64MiB", threads=1, spill=True) as engine:
        handle = engine.submit(job)
        with stops.at(6):
            asked = in_thread(lambda: engine.resize(need * 7 // 10))
        asked.join(300)
        assert engine.budget == need * 7 // 10
        with stops.at(20):
            assert handle._job.steps.spiller.is_needed
            asked = in_thread(lambda: engine.resize("64MiB"))
        asked.join(300)
        assert handle.result(300).state == "finished"
    assert_equal_to_eager(job, handle.result(), make_deep("a"))
