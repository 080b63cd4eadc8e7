"""A job inside the engine: one life, one end, and no tensor kept by its error."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.support.engine_parts import Parts, make_job, parts
from waterflow.engine.events import MemoryMoved, StateChanged
from waterflow.engine.states import JobState, TransitionError

pytestmark = pytest.mark.cpu


@pytest.fixture
def engine() -> Iterator[Parts]:
    with parts() as found:
        yield found


def test_the_first_end_counts(engine: Parts) -> None:
    run = engine.submit(make_job("a"))
    first = ValueError("first")
    run.fail(first)
    run.fail(RuntimeError("second"))
    run.end(JobState.FINISHED)
    changes = [event for event in engine.events if isinstance(event, StateChanged)]
    assert changes == [StateChanged("a", JobState.QUEUED, JobState.FAILED, first)]
    assert run.ended
    assert run.is_gone


def test_memory_that_is_not_there_is_a_state_of_its_own(engine: Parts) -> None:
    run = engine.submit(make_job("a"))
    run.fail(torch.OutOfMemoryError("nothing left"))
    assert run.state is JobState.OUT_OF_MEMORY


def test_what_cannot_be_is_refused(engine: Parts) -> None:
    run = engine.submit(make_job("a"))
    with pytest.raises(TransitionError, match="'a' is queued and cannot become resuming"):
        run.become(JobState.RESUMING)
    assert run.state is JobState.QUEUED
    assert not any(isinstance(event, StateChanged) for event in engine.events)


def test_an_error_keeps_no_tensor_of_its_frames(engine: Parts) -> None:
    kept = []

    def broken() -> None:
        tensor = torch.ones(8)
        kept.append(weakref.ref(tensor))
        raise ValueError("broken")

    run = engine.submit(make_job("a"))
    assert engine.context.run_isolated(run, broken) is None
    assert run.state is JobState.FAILED
    assert kept[0]() is None


def test_what_a_user_s_code_returns_comes_through(engine: Parts) -> None:
    run = engine.submit(make_job("a"))
    outcome = engine.context.run_isolated(run, lambda: None)
    assert outcome is not None
    assert outcome.value is None
    assert not run.ended


def test_a_job_comes_into_the_arena_and_leaves_it_as_it_was(engine: Parts) -> None:
    arena = engine.context.arena
    before = arena.version
    run, _ = engine.enter(make_job("a"))
    assert run.resident
    assert arena.held(run.number) > 0
    values = {name: p.detach().clone() for name, p in run.job.model.named_parameters()}
    run.end(JobState.STOPPED)
    assert not run.is_gone
    run.move_out(engine.context.residency)
    assert run.is_gone
    assert arena.held(run.number) == 0
    assert arena.version == before
    assert [event.held > 0 for event in engine.events if isinstance(event, MemoryMoved)] == [
        True,
        False,
    ]
    for name, parameter in run.job.model.named_parameters():
        assert torch.equal(parameter, values[name])
