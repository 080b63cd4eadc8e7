"""Steps in flight: settled in the loop's order, and a failed one is its job's end alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import waterflow as wf
from tests.support.engine_parts import Parts, make_job, parts
from waterflow.engine.events import GroupsRan, StateChanged, StepDone
from waterflow.engine.in_flight import Launch, ScheduledStep, StepsInFlight, run_eager_step
from waterflow.engine.states import JobState

pytestmark = pytest.mark.cpu


@pytest.fixture
def engine() -> Iterator[Parts]:
    with parts() as found:
        yield found


@dataclass
class Queued:
    """What lanes would hand back, with errors where a test wants them."""

    errors: Sequence[BaseException | None]
    waited: list[str] = field(default_factory=list)

    def wait(self) -> None:
        self.waited.append("waited")

    def losses(self) -> list[float]:
        assert self.waited, "losses are there once the step is done"
        return [float(place) for place in range(len(self.errors))]

    def spans(self) -> list[tuple[int, int, int, float, float]]:
        return [(0, place, 0, 1.0, 2.0) for place in range(len(self.errors))]


def scheduled(engine: Parts, job: wf.Job) -> ScheduledStep:
    run, batch = engine.enter(job)
    step = run.captured.ready_step(batch)
    assert step is not None
    return ScheduledStep(run, step, batch, run.loop.rates())


def steps_done(engine: Parts) -> list[tuple[str, float]]:
    return [(event.job, event.loss) for event in engine.events if isinstance(event, StepDone)]


def test_on_the_host_a_step_is_complete_when_it_is_settled(engine: Parts) -> None:
    steps = [scheduled(engine, make_job("a")), scheduled(engine, make_job("b", 16))]
    in_flight = StepsInFlight(engine.context)
    in_flight.settle(Launch(Queued([None, None]), steps))
    assert not in_flight.pending
    assert steps_done(engine) == [("a", 0.0), ("b", 1.0)]
    ran = [event for event in engine.events if isinstance(event, GroupsRan)]
    assert [event.jobs for event in ran] == [("a", "b")]
    assert all(step.job.feeder._done == 1 for step in steps), "the next batch may be fetched"


def test_a_failed_step_ends_its_job_and_no_other(engine: Parts) -> None:
    steps = [scheduled(engine, make_job("a")), scheduled(engine, make_job("b", 16))]
    error = ValueError("broken")
    StepsInFlight(engine.context).settle(Launch(Queued([error, None]), steps))
    assert steps[0].job.state is JobState.FAILED
    assert steps[1].job.state is JobState.RUNNING
    assert steps_done(engine) == [("b", 1.0)]
    (ended,) = [e for e in engine.events if isinstance(e, StateChanged) and e.after.ended]
    assert (ended.job, ended.error) == ("a", error)
    assert all(step.job.feeder._done == 1 for step in steps)


def test_where_the_device_queues_a_step_is_completed_with_the_next(
    engine: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.context.lanes.device), "queues", True)
    step = scheduled(engine, make_job("a"))
    in_flight = StepsInFlight(engine.context)
    first, second = Launch(Queued([None]), [step]), Launch(Queued([None]), [step])
    in_flight.settle(first)
    assert in_flight.pending
    assert in_flight.result_of(step.job) is first.result
    assert steps_done(engine) == []
    in_flight.settle(second)
    assert first.result.waited
    assert len(steps_done(engine)) == 1
    in_flight.complete_all()
    assert len(steps_done(engine)) == 2
    assert not in_flight.pending


def test_a_callback_is_asked_before_the_next_batch_is_fetched(engine: Parts) -> None:
    done: list[int] = []

    def on_step(result: wf.StepResult) -> None:
        done.append(step.job.feeder._done)

    step = scheduled(engine, make_job("a", on_step=on_step))
    StepsInFlight(engine.context).settle(Launch(Queued([None]), [step]))
    assert done == [0]
    assert step.job.feeder._done == 1


@pytest.mark.parametrize("fails", ["step", "callback", None])
def test_an_eager_step_goes_on_unless_something_of_the_users_fails(
    engine: Parts, fails: str | None
) -> None:
    def on_step(result: Any) -> None:
        if fails == "callback":
            raise ValueError("callback")

    def step() -> tuple[float, tuple[float, ...]]:
        if fails == "step":
            raise ValueError("step")
        return 0.5, (0.1,)

    run, _ = engine.enter(make_job("a", on_step=on_step))
    assert run_eager_step(engine.context, run, 0, step, at_home=False) is (fails is None)
    assert run.state is (JobState.RUNNING if fails is None else JobState.FAILED)
    assert steps_done(engine) == ([] if fails == "step" else [("a", 0.5)])
    assert any(isinstance(event, GroupsRan) for event in engine.events)
