"""Runs rounds: one step of every job that is ready, planned together."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from waterflow.common.errors import BudgetError
from waterflow.engine.context import GrowRoom, Outcome, RunContext
from waterflow.engine.eager_train import account_for_room, run_train
from waterflow.engine.in_flight import Launch, ScheduledStep, StepsInFlight, run_eager_step
from waterflow.engine.job_run import JobRun
from waterflow.engine.round_planner import RoundPlanner
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.run.eager_room import OpenRoom
from waterflow.steps.prepared import PreparedBatch


class RoundExecutor:
    """Runs the rounds of one engine, on the engine's thread."""

    def __init__(
        self,
        context: RunContext,
        planner: RoundPlanner,
        in_flight: StepsInFlight,
        no_place: Callable[[JobRun, PreparedBatch, BudgetError], BudgetError],
        grow: GrowRoom,
    ) -> None:
        """Args beyond the obvious.

        no_place: makes the error of a step that finds no place, for its user to read.
        grow: enlarges the room of a job's eager step, see `Surges.grow`.
        """
        self._no_place = no_place
        self._grow = grow
        self._context = context
        self._planner = planner
        self._in_flight = in_flight
        self.seconds = 0.0  # that the last round took

    def run(self, batches: Sequence[tuple[JobRun, FeedItem[PreparedBatch]]]) -> None:
        """Runs one step of each job, on the batch that was taken for it. A job that is to rest, as
        another's step asks for more than there is, makes none, and gets its batch back.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        if not batches:
            return
        started = time.perf_counter()
        self._run(batches)
        self.seconds = time.perf_counter() - started

    def _run(self, batches: Sequence[tuple[JobRun, FeedItem[PreparedBatch]]]) -> None:
        captured: list[ScheduledStep] = []
        apart: list[tuple[JobRun, FeedItem[PreparedBatch]]] = []
        for job, fed in batches:
            batch = self._entered(job, fed)
            if batch is None:
                continue
            if job.captured.runs_apart(batch.value):
                apart.append((job, dataclasses.replace(fed, item=batch.value)))
                continue
            loaded = self._loaded(job, batch.value)
            if loaded is None:
                continue
            if loaded.value.step.creates_state:
                self._run_first(loaded.value)
            else:
                captured.append(loaded.value)
        if captured:
            self._run_together(captured)
        for job, fed in apart:
            if job.gives_way:
                job.feeder.put_back([fed])
            else:
                self._context.run_isolated(job, self._run_apart, job, fed, alone=not captured)

    def _entered(self, job: JobRun, fed: FeedItem[PreparedBatch]) -> Outcome[PreparedBatch] | None:
        """The batch, in its epoch, ready for the user's Python as it is now; None where the job
        makes no step on it."""
        assert fed.item is not None
        if job.gives_way:
            job.feeder.put_back([fed])
            return None
        context = self._context
        if context.run_isolated(job, job.loop.enter_epoch, fed.epoch) is None:
            return None
        return context.run_isolated(job, job.refresh, fed.item, context.residency)

    def _loaded(self, job: JobRun, batch: PreparedBatch) -> Outcome[ScheduledStep] | None:
        """The step to run, bound and with its batch; None where that ends the job."""
        return self._context.run_isolated(job, self._load, job, batch)

    def _load(self, job: JobRun, batch: PreparedBatch) -> ScheduledStep:
        context = self._context
        step = job.captured.choose(batch, context.residency)
        job.captured.open_input(batch, context.lanes, context.residency)
        job.captured.load(step, batch)
        return ScheduledStep(job, step, batch, job.loop.rates())

    def _run_first(self, scheduled: ScheduledStep) -> None:
        """The step that creates the optimizer's state runs alone; then the state is put away."""
        job, step = scheduled.job, scheduled.step
        try:
            launch = self._launch([scheduled])
        except BudgetError as misfit:
            self._fail(scheduled, misfit)
            return
        if not launch.has_failed:
            job.captured.take_state(step)
            self._context.run_isolated(job, job.move_in, self._context.residency)
        self._settle(launch)
        self._in_flight.complete_all()
        self._context.residency.repack()

    def _run_together(self, steps: Sequence[ScheduledStep]) -> None:
        try:
            launch = self._launch(steps)
        except BudgetError as misfit:
            self._run_one_by_one(steps, misfit)
            return
        for scheduled in steps:
            scheduled.job.captured.send_ahead(scheduled.job.next_batch())
        self._settle(launch)

    def _run_one_by_one(self, steps: Sequence[ScheduledStep], error: BudgetError) -> None:
        if len(steps) > 1:
            for one in steps:
                self._run_together([one])
        else:
            self._fail(steps[0], error)

    def _launch(self, steps: Sequence[ScheduledStep]) -> Launch:
        """Runs or queues a planned round."""
        plan = self._planner.plan(steps)
        creates = any(scheduled.step.creates_state for scheduled in steps)
        plan.begin(self._context.arena, own_blocks=not (creates or self._context.check))
        return Launch(self._context.lanes.run(plan.round), steps)

    def _settle(self, launch: Launch) -> None:
        self._in_flight.complete_all()  # of jobs that are not in this round, too
        self._in_flight.settle(launch)
        if launch.has_failed:
            self._context.arena.synchronize()

    def _fail(self, scheduled: ScheduledStep, misfit: BudgetError) -> None:
        """The step finds no place, and has not run."""
        misfit = self._no_place(scheduled.job, scheduled.batch, misfit)
        self._in_flight.fail(scheduled, misfit)
        self._context.arena.synchronize()

    def _run_apart(self, job: JobRun, fed: FeedItem[PreparedBatch], alone: bool) -> None:
        """A step that is eager Python, wholly or in part, runs while no other job's does; `alone`
        says that no captured step waits for it, so that others may follow at once."""
        context, batch = self._context, fed.item
        assert batch is not None
        self._in_flight.complete_all()
        if batch.is_plainly_eager and job.eager.open_room(context.lanes, 0):
            self._run_train(job, fed, alone)
            return

        step = functools.partial(self._make_apart, job, batch)
        at_home = batch.specialization is None
        goes_on = run_eager_step(context, job, 0, step, at_home=at_home)
        if not goes_on:
            context.check_device()
        context.arena.synchronize()
        if goes_on:
            job.eager.measure(context.arena)
            context.residency.repack_if_sparse()  # closes the gaps that it has left
            job.tell_of_needs()
        job.feeder.step_done()

    def _make_apart(self, job: JobRun, batch: PreparedBatch) -> tuple[float, tuple[float, ...]]:
        context = self._context
        room, rates = OpenRoom(context.lanes), job.loop.rates()
        loss = job.eager.run_apart(
            *(context.lanes, context.residency, batch),
            more=lambda size: self._grow(job, room, size, [job]),
        )
        job.account(context.residency)
        return loss, rates

    def _run_train(self, job: JobRun, fed: FeedItem[PreparedBatch], alone: bool) -> None:
        """Eager steps one after another, in all the room that there is."""
        room = job.eager.room
        assert room is not None
        memory = room.scope(lambda size: self._grow(job, room, size, [job]))
        run_train(
            *(self._context, job, 0, fed, memory, lambda: alone),
            accounts=True,
            beside=lambda: 1,  # in a round, eager steps are nobody else's
        )
        job.eager.close_room()
        account_for_room(self._context, job)
