"""The budget changed while jobs run: held at every moment, nobody's numbers touched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.waterflow.engine.test_suspension import (
    Stops,
    assert_equal_to_eager,
    make_job,
    needed,
)
from waterflow.engine.events import BudgetChanged

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
            asked.join(60)
            assert engine.budget == budget
            if budget < room:
                assert engine._arena.statistics().capacity <= budget
        assert [handle.result(60).state for handle in handles] == ["finished"] * 2
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
        asked.join(60)
        assert engine.budget == 64 << 20
    assert "cannot become 1024 bytes (1.0 KiB): 'a' holds" in str(errors[0])
    assert_equal_to_eager(job, handle.result(), make_job("a", 1))


def test_opportunistic_jobs_make_room_and_come_back() -> None:
    stops = Stops(3, 8)
    first = make_job("first", 2, on_step=stops, capture=True, priority="guaranteed")
    other = make_job("other", 1, epochs=40, capture=True, priority="opportunistic")
    room = needed(make_job("first", 2, capture=True))
    with wf.Engine("64MiB", threads=1) as engine:
        one, two = engine.submit(first), engine.submit(other)
        with stops.at(3):
            asked = threading.Thread(target=engine.resize, args=(room,))
            asked.start()
        asked.join(60)
        assert two.status == "suspended"
        made = len(two.losses)
        with stops.at(8):
            assert len(two.losses) == made
            asked = threading.Thread(target=engine.resize, args=("64MiB",))
            asked.start()
        asked.join(60)
        assert two.result(120).state == "finished"
    assert_equal_to_eager(first, one.result(), make_job("first", 2))
    assert_equal_to_eager(other, two.result(), make_job("other", 1, epochs=40))


def test_in_a_callback_it_does_not_wait_for_itself() -> None:
    def shrink(result: wf.StepResult) -> None:
        if result.step == 3:
            engine.resize("32MiB")

    job = make_job("a", 1, on_step=shrink)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(job)
        handle.result(60)
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
        assert handle.suspend(60)
        engine.resize("1MiB")
        assert before - resident_bytes() > 200 << 20
        engine.resize("2GiB")
        handle.resume()
        assert handle.result(60).state == "finished"
