"""What comes between steps comes as in the plain loop, and is told of."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.support.engine_parts import make_job
from waterflow.engine.events import EpochEntered, Event, EventStream, StepDone
from waterflow.engine.states import JobState
from waterflow.engine.user_loop import UserLoop
from waterflow.job.training_step import learning_rates

pytestmark = pytest.mark.cpu


class Recorded:
    """A loop whose Python, ends and events are written down in one list."""

    def __init__(self, **options: Any) -> None:
        self.seen: list[Any] = []
        self.events: list[Event] = []
        self.job = make_job("a", on_step=options.pop("on_step", None), **options)
        stream = EventStream()
        stream.subscribe(self.events.append)
        self.loop = UserLoop(self.job, lambda function: function(), self.seen.append, stream)


def scheduled(every: str) -> dict[str, Any]:
    halved = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    return {"scheduler": halved, "scheduler_every": every}


def test_steps_are_counted_and_told_of() -> None:
    found = Recorded(steps=2)
    found.loop.finish_step(0.5, (0.1,))
    assert found.seen == []
    found.loop.finish_step(0.25, (0.1,))
    assert found.seen == [JobState.FINISHED]
    assert found.events == [StepDone("a", 1, 0.5), StepDone("a", 2, 0.25)]


def test_a_callback_hears_of_a_step_once_it_is_told_and_may_stop_the_job() -> None:
    heard: list[wf.StepResult] = []

    def on_step(result: wf.StepResult) -> object:
        heard.append(result)
        assert len(found.events) == result.step
        return wf.STOP

    found = Recorded(steps=1, on_step=on_step)
    found.loop.finish_step(0.5, (0.1,))
    assert found.seen == [JobState.STOPPED]
    assert (heard[0].step, heard[0].loss, heard[0].learning_rates) == (1, 0.5, (0.1,))


def test_a_scheduler_of_steps_is_stepped_before_the_loss_is_known_unless_it_is_waited_for() -> None:
    found = Recorded(**scheduled("step"))
    assert not found.loop.waits_for_loss
    found.loop.step_queued()
    assert learning_rates(found.job) == (0.05,)
    assert found.loop.rates() == (), "nobody is told of them"
    found.loop.finish_step(0.1, (1.0,))
    assert learning_rates(found.job) == (0.05,), "once a step"
    asked = Recorded(**scheduled("step"), on_step=lambda result: None)
    assert asked.loop.waits_for_loss
    asked.loop.step_queued()
    assert learning_rates(asked.job) == asked.loop.rates() == (0.1,)
    asked.loop.finish_step(0.1, (1.0,))
    assert learning_rates(asked.job) == (0.05,)


def test_epochs_that_lie_behind_step_the_scheduler_once_each() -> None:
    found = Recorded(**scheduled("epoch"))
    found.loop.enter_epoch(0)
    assert found.events == []
    found.loop.enter_epoch(2)
    found.loop.enter_epoch(2)
    assert found.events == [EpochEntered("a", 1, 0), EpochEntered("a", 2, 0)]
    assert learning_rates(found.job) == (0.025,)
    assert found.loop.epoch == 2


def test_a_loss_that_is_not_finite_is_told_of_and_raised() -> None:
    found = Recorded(stop_on_nan=True)
    with pytest.raises(wf.NonFiniteLossError, match="step 1"):
        found.loop.finish_step(float("nan"), (0.1,))
    assert len(found.events) == 1
