"""Steps between their start and their end: launched, settled, completed.

On a device lanes only queue a step. It is completed (its loss read, the callback asked) while the
device already works on the next one, unless something of the user's must know the loss before that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from waterflow.engine.context import Outcome, RunContext
from waterflow.engine.events import GroupsRan
from waterflow.engine.job_run import JobRun
from waterflow.executor.data.feeder import FeedItem
from waterflow.job.evaluation import Evaluated
from waterflow.report.step_loss import with_metrics
from waterflow.steps.prepared import PreparedBatch, PreparedStep, losses_of


class ScheduledStep(NamedTuple):
    """A captured step that is about to run, with its batch loaded.

    `rates` are the learning rates that it runs with; `batch` is kept, as the device may still read
    it after the next one has begun.
    """

    job: JobRun
    step: PreparedStep
    batch: PreparedBatch
    rates: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """Steps that lanes have run or queued together, in the order of their places in `result`."""

    result: Any
    steps: Sequence[ScheduledStep]

    @property
    def errors(self) -> Sequence[BaseException | None]:
        """What kept each step from being run or queued as a whole."""
        return self.result.errors  # type: ignore[no-any-return]

    @property
    def has_failed(self) -> bool:
        """Whether one of the steps has."""
        return any(error is not None for error in self.errors)


class StepsInFlight:
    """Settles what has been launched, and completes it in time.

    Lanes call it for jobs of their own; a job has at most one step in flight when its next one is
    launched.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._launches: dict[JobRun, Launch] = {}  # of the jobs that go on

    @property
    def pending(self) -> bool:
        """Whether a step waits to be completed."""
        return bool(self._launches)

    def result_of(self, job: JobRun) -> Any:
        """The result of the job's step in flight, None where there is none."""
        launch = self._launches.get(job)
        return None if launch is None else launch.result

    def settle(self, launch: Launch) -> None:
        """Ends the jobs whose steps have failed, completes what the others have had in flight, and
        these steps, too, where something waits for their losses.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        if launch.has_failed:
            self._context.check_device()
        self.complete([scheduled.job for scheduled in launch.steps])
        going = []
        for scheduled, error in zip(launch.steps, launch.errors, strict=True):
            if error is None:
                going.append(scheduled.job)
            else:
                self.fail(scheduled, error)
        with self._context.python:
            for job in going:
                self._context.run_isolated(job, job.loop.step_queued)
                self._launches[job] = launch
        if not self._context.lanes.device.queues or any(job.loop.waits_for_loss for job in going):
            self.complete(going)
        for job in going:  # callbacks come before the next batch is fetched
            job.feeder.step_done()

    def settle_train(self, scheduled: ScheduledStep, result: Any) -> None:
        """Tells of the steps of a train, which are done; ends its job where the next has failed.

        Args:
            scheduled: the step, for all of them; with the batch of the one that has failed.
            result: the extension's `TrainResult`.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        job, losses, spans = scheduled.job, result.losses, result.spans()
        if names := scheduled.step.graph.metrics:
            each = zip(losses, result.metrics, strict=True)
            losses = [with_metrics(loss, names, numbers) for loss, numbers in each]
        if losses:
            with self._context.python:
                told = losses, spans, result.scheduled, scheduled.rates
                self._context.run_isolated(job, job.loop.finish_train, *told)
        if result.error is not None and not job.ended:
            self._context.check_device()
            self.fail(scheduled, result.error)
        job.feeder.step_done(len(losses))  # callbacks come before the next batch is fetched

    def fail(self, scheduled: ScheduledStep, error: BaseException) -> None:
        """Ends the job of a step that could not be run, with what its tape has been given."""
        with self._context.python:
            scheduled.step.compiled.tape.clear(scheduled.step.compiled.transient)
        scheduled.job.fail_in_captured_step(error, scheduled.batch)
        scheduled.job.feeder.step_done()

    def complete(self, jobs: Sequence[JobRun]) -> None:
        """Waits for the steps of these jobs that are in flight, and those launched with them; reads
        their losses and asks their callbacks."""
        for job in jobs:
            launch = self._launches.get(job)
            if launch is not None:
                self._complete(launch)

    def complete_all(self) -> None:
        """Completes whatever is in flight."""
        self.complete(list(self._launches))

    def _complete(self, launch: Launch) -> None:
        going = [self._launches.pop(scheduled.job, None) for scheduled in launch.steps]
        launch.result.wait()
        spans = launch.result.spans()
        losses = losses_of([scheduled.step for scheduled in launch.steps], launch.result)
        with self._context.python:
            names = tuple(scheduled.job.name for scheduled in launch.steps)
            self._context.events.publish(GroupsRan(names, spans))
            for place, (job, _, _, rates) in enumerate(launch.steps):
                if going[place] is not None:
                    self._context.run_isolated(job, job.loop.finish_step, losses[place], rates)


def run_eager_step(
    context: RunContext,
    job: JobRun,
    lane: int,
    step: Callable[[], tuple[float, tuple[float, ...]]],
    *,
    at_home: bool,
) -> bool:
    """Runs a step in the user's Python and what follows it; returns whether the job goes on.

    Args:
        context: the engine's.
        job: whose step.
        lane: the calling thread's.
        step: makes the step, returns its loss and the learning rates that it ran with; raises
            what ends the job.
        at_home: whether what follows it is done on the job's own thread, as the step was.
    """
    started = time.perf_counter()
    made = context.run_isolated(job, step)
    span = (lane, 0, 0, started, time.perf_counter())
    finish = functools.partial(_finish_eager_step, context, job, span, made)
    return job.at_home(finish) if at_home else finish()


def _finish_eager_step(
    context: RunContext,
    job: JobRun,
    span: tuple[Any, ...],
    made: Outcome[tuple[float, tuple[float, ...]]] | None,
) -> bool:
    """Returns whether the job goes on."""
    with context.python:
        context.events.publish(GroupsRan((job.name,), [span]))
        finished = None
        if made is not None:
            finished = context.run_isolated(job, job.loop.finish_eager_step, *made.value)
        drop_gradients(context, job)
    return finished is not None


def drop_gradients(context: RunContext, job: JobRun) -> None:
    """Lets go of the gradients of the job's last step, unless its callback is yet to see them: it
    waits for an evaluation. Between steps, with the lock for Python."""
    if job.ended or not job.loop.owes_callback:
        context.run_isolated(job, job.eager.drop_gradients, context.residency)


def pass_boundary(
    context: RunContext,
    in_flight: StepsInFlight,
    job: JobRun,
    fed: FeedItem[PreparedBatch],
    evaluate: Callable[[], Evaluated],
) -> None:
    """Has done what somebody wants at a boundary that the job's feeder has handed out: the job's
    own evaluation first.

    All steps of the job are done then and no batch is fetched ahead, so its tensors and its random
    streams are those of the plain loop after as many steps. The caller has the job to himself.

    Args:
        context: the engine's.
        in_flight: the engine's.
        job: whose feeder.
        fed: the boundary.
        evaluate: evaluates the job with memory that its tensors may come from.
    """
    in_flight.complete([job])
    if not job.ended and job.loop.awaits_evaluation(fed.epoch_ended):
        found = context.run_isolated(job, evaluate)  # without the lock: others go on meanwhile
        if found is not None:
            with context.python:
                context.run_isolated(job, job.loop.finish_evaluation, found.value)
                job.note_evaluation()
        with context.python:
            drop_gradients(context, job)
    if not job.ended and job.before_due(job.feeder.place.steps, 1) == 0:
        context.run_isolated(job, job.at_boundary)
    if not job.stop_requested:  # else its data are not asked for a batch that nobody would take
        job.feeder.go_on()
