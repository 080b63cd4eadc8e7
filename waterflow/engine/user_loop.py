"""What a user's loop does between steps: epochs, schedulers, checks of the loss, callbacks."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from waterflow.engine.events import EpochEntered, Evaluated, EventStream, StepDone, TrainRan
from waterflow.engine.states import JobState
from waterflow.job import evaluation
from waterflow.job.evaluation import EvaluationTimes, check_answer
from waterflow.job.job import Job
from waterflow.job.several import follows_metric, optimizers_in
from waterflow.job.training_step import check_finite, learning_rates, result_of, step_scheduler
from waterflow.steps.foretold import may_be_foretold


class Between(enum.Enum):
    """What comes between two steps of a job in one epoch."""

    NOTHING = enum.auto()
    NUMBERS = enum.auto()  # that schedulers set, which can be worked out ahead
    PYTHON = enum.auto()


class UserLoop:
    """The Python of one job between its steps, in the order of the plain loop."""

    def __init__(
        self,
        job: Job,
        python: Callable[[Callable[[], Any]], Any],
        end: Callable[[JobState], None],
        events: EventStream,
        callback: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        """Args beyond the obvious.

        python: runs Python of the job's, in its caller's context and with its random streams.
        end: ends the job.
        callback: the same for its callback, which may have a thread of its own.
        """
        self._job = job
        self._name = job.name  # by which it is known, whatever a callback calls it
        self._python = python
        self._callback = callback or python
        self._times = EvaluationTimes(job)
        self._unanswered: tuple[float, tuple[float, ...]] | None = None
        self.evaluated = -1  # steps done at the latest evaluation
        self._end = end
        self._events = events
        self._latest_loss = math.nan
        self.epoch = 0
        self.steps = 0  # done
        self._begun = 0  # the same, with those whose losses a device has yet to tell
        #: Tells of steps that nobody has been told of; called before an epoch is entered.
        self.tell_of_steps: Callable[[], None] = tell_nothing
        #: Raises where the epoch that has ended was not the plain loop's.
        self.check_epoch: Callable[[], None] = tell_nothing

    def go_on_from(self, epoch: int, steps: int, latest_loss: float) -> None:
        """Begins where another loop has left off."""
        self.epoch, self.steps, self._latest_loss = epoch, steps, latest_loss
        self._begun = steps

    @property
    def latest_loss(self) -> float:
        """The loss of the last step that was told of; NaN before the first."""
        return self._latest_loss

    def is_due(self, steps: int) -> bool:
        """Whether an evaluation follows that step, before anything else of the job's."""
        return self._times.is_due(steps)

    def before_due(self, steps: int, most: int) -> int:
        """How many more steps there may be, `most` at most, before one is due."""
        return self._times.before_due(steps, most)

    @property
    def at_found_ends(self) -> bool:
        """Whether the job is evaluated where an epoch is found to have ended."""
        return self._times.at_found_ends

    def awaits_evaluation(self, at_end: bool) -> bool:
        """Whether the job is to be evaluated now; `at_end`: at a found end of an epoch."""
        at_start = self.steps == 0 and self._times.is_due(0)
        due = self._unanswered is not None or at_start or (at_end and self.at_found_ends)
        return due and self.evaluated < self.steps

    @property
    def owes_callback(self) -> bool:
        """Whether the callback of the last step is yet to come: after the evaluation."""
        return self._unanswered is not None and self._job.on_step is not None

    @property
    def waits_for_loss(self) -> bool:
        """Whether something of the user's must know a step's loss before the next step begins."""
        job = self._job
        return job.on_step is not None or job.stop_on_nan or follows_metric(job.scheduler)

    @property
    def acts_between_steps(self) -> bool:
        """Whether something of the user's comes after each step."""
        return self._job.on_step is not None or self._is_scheduled

    @property
    def _is_scheduled(self) -> bool:
        return self._job.scheduler is not None and self._job.scheduler_every == "step"

    @property
    def between(self) -> Between:
        """What comes after each step."""
        if not self.acts_between_steps:
            return Between.NOTHING
        ahead = self._job.on_step is None and may_be_foretold(self._job)
        return Between.NUMBERS if ahead else Between.PYTHON

    @property
    def shows_rates(self) -> bool:
        """Whether somebody asks for the learning rates of a step."""
        return self._job.on_step is not None

    def rates(self) -> tuple[float, ...]:
        """The learning rates now, where a callback is to be told of them."""
        return () if self._job.on_step is None else learning_rates(self._job)

    def enter_epoch(self, epoch: int) -> None:
        """Steps a per-epoch scheduler for every epoch that lies behind."""
        if self.epoch < epoch:
            self.tell_of_steps()
            self.check_epoch()
        while self.epoch < epoch:
            self.epoch += 1
            self._events.publish(EpochEntered(self._name, self.epoch, self._begun))
            self._step_scheduler("epoch", self._latest_loss)

    def step_queued(self) -> None:
        """A step is on its way, its loss not known yet: what the next one needs is done now.

        Raises:
            Whatever the scheduler raises.
        """
        self._begun += 1
        if not self.waits_for_loss:
            self._step_scheduler("step", math.nan)

    def finish_step(self, loss: float, rates: tuple[float, ...]) -> None:
        """After a step: tells of it, steps the scheduler, asks the callback.

        Raises:
            NonFiniteLossError: the job asked to stop on that.
            Whatever the callback or the scheduler raises.
        """
        job = self._job
        self.steps += 1
        self._latest_loss = loss
        self._events.publish(StepDone(self._name, self.steps, loss))
        check_finite(job, self.steps, loss)
        if self.waits_for_loss:
            self._step_scheduler("step", loss)
        self._ask(loss, rates)

    def finish_evaluation(self, found: evaluation.Evaluated) -> None:
        """After an evaluation: tells of it, and asks the callback that has waited for it.

        Raises:
            Whatever the callback raises.
        """
        unanswered, self._unanswered = self._unanswered, None
        self.evaluated = self.steps
        if found.values is not None:
            self._events.publish(Evaluated(self._name, self.steps, found.values))
        stops = found.stops
        if unanswered is not None:
            stops = self._stops(*unanswered, found.values) or stops
        if stops:
            self._end(JobState.STOPPED)
        elif unanswered is not None:
            self._end_after_last()

    def _stops(
        self, loss: float, rates: tuple[float, ...], values: Mapping[str, float] | None
    ) -> bool:
        """Asks the callback, if there is one, whether the job is to end."""
        job, on_step = self._job, self._job.on_step
        if on_step is None:
            return False
        ended = self._times.ends_epoch(self.steps)
        result = result_of(job, (self.steps, self.epoch, loss, rates), ended, values)
        return check_answer(job, self._callback(functools.partial(on_step, result)))

    def finish_train(
        self,
        losses: Sequence[float],
        spans: Sequence[tuple[Any, ...]],
        scheduled: int = 0,
        rates: tuple[float, ...] = (),
    ) -> None:
        """The same after many steps, where no Python of the user's comes between two of them.

        Args:
            losses: of the steps.
            spans: see `TrainRan`.
            scheduled: after so many of them, the scheduler has been seen to.
            rates: of the only step, where a callback is to be told of them.

        Raises:
            NonFiniteLossError: the last loss is none, and the job asked to stop on that.
            Whatever the scheduler raises, or the callback.
        """
        left = losses[scheduled:] if self._is_scheduled else ()  # one at most
        if not self.waits_for_loss:
            try:
                self._catch_up(left)
            except BaseException:  # then its step is none that was made
                self._tell(losses[:-1], spans[: len(spans) - len(spans) // len(losses)])
                raise
        self._tell(losses, spans)
        check_finite(self._job, self.steps, losses[-1])
        if self.waits_for_loss:
            self._catch_up(left)
        self._ask(losses[-1], rates)

    def _tell(self, losses: Sequence[float], spans: Sequence[tuple[Any, ...]]) -> None:
        if losses:
            first, self.steps = self.steps + 1, self.steps + len(losses)
            self._begun = self.steps
            self._latest_loss = losses[-1]
            self._events.publish_train(TrainRan(self._name, first, losses, spans))

    def _catch_up(self, losses: Sequence[float]) -> None:
        for loss in losses:
            self._step_scheduler("step", loss)

    def _ask(self, loss: float, rates: tuple[float, ...]) -> None:
        """Asks the callback about the last step, unless an evaluation comes first."""
        if self.is_due(self.steps):
            self._unanswered = loss, rates  # until `finish_evaluation`
        elif self._stops(loss, rates, None):
            self._end(JobState.STOPPED)
        else:
            self._end_after_last()

    def _end_after_last(self) -> None:
        if self._job.steps is not None and self.steps >= self._job.steps:
            self._end(JobState.FINISHED)

    def finish_eager_step(self, loss: float, rates: tuple[float, ...]) -> None:
        """The same after a step whose loss is known at once."""
        self.step_queued()
        self.finish_step(loss, rates)

    def _step_scheduler(self, every: str, loss: float) -> None:
        if self._job.scheduler is not None and self._job.scheduler_every == every:
            # A captured step calls no step(), which schedulers that have wrapped it would warn of.
            for optimizer in optimizers_in(self._job.optimizer):
                if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                    optimizer._opt_called = True  # type: ignore[attr-defined]
            self._python(functools.partial(step_scheduler, self._job, every, loss))


def tell_nothing() -> None:
    """All steps have been told of."""
