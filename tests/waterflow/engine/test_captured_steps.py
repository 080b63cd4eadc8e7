"""Which captured step a batch needs, and what has to be there before a lane may run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.data import pairs
from tests.support.engine_parts import Parts, make_job, parts

pytestmark = pytest.mark.cpu


@pytest.fixture
def engine() -> Iterator[Parts]:
    with parts() as found:
        yield found


def test_a_step_is_ready_once_it_is_checked_and_bound(engine: Parts) -> None:
    job = make_job("a")
    run = engine.submit(job)
    batch = run.steps.preparer.prepare(next(iter(job.data)))
    assert run.captured.ready_step(batch) is None
    assert run.captured.runs_apart(batch), "its first use is a check"
    run.move_in(engine.context.residency)
    run.eager.run_apart(engine.context.lanes, engine.context.residency, batch)
    step = run.captured.ready_step(batch)
    assert step is not None
    assert step in run.captured.steady
    assert not run.captured.runs_apart(batch)


def test_other_tensors_make_it_unready_until_it_is_bound_to_them(engine: Parts) -> None:
    run, batch = engine.enter(make_job("a"))
    model = run.job.model
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 4))  # type: ignore[index, union-attr]
    run.steps.cache.collect_persistent()
    assert run.captured.tensors_have_changed
    assert run.captured.ready_step(batch) is None
    run.captured.unbind()
    assert run.captured.bound == []
    assert not run.captured.tensors_have_changed


def test_steps_are_counted_as_they_are_loaded(engine: Parts) -> None:
    run, batch = engine.enter(make_job("a"))
    step = run.captured.ready_step(batch)
    assert step is not None
    begun = run.captured.begun
    run.captured.load(step, batch)
    assert (run.captured.begun, run.captured.unchecked) == (begun + 1, 1)


def test_a_batch_of_another_shape_needs_another_step(engine: Parts) -> None:
    job = make_job("a", data=pairs(sizes=(4, 2)))
    run, batch = engine.enter(job)
    other = run.steps.preparer.prepare(list(job.data)[1])
    assert run.captured.ready_step(other) is None
    assert run.captured.choose(other, engine.context.residency) is not run.captured.choose(
        batch, engine.context.residency
    )


def test_a_job_that_is_not_captured_runs_apart(engine: Parts) -> None:
    job = make_job("a", capture=False)
    run = engine.submit(job)
    batch = run.steps.preparer.prepare(next(iter(job.data)))
    assert run.captured.exclusive
    assert run.captured.runs_apart(batch)
    assert run.captured.ready_step(batch) is None
