"""The engine's own thread: lets jobs in and out, and has the executors run their steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from waterflow.common.errors import BudgetError, DeviceLostError, JobError
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import EngineEnded, Event, StateChanged
from waterflow.engine.flow import Batches, FlowExecutor
from waterflow.engine.flow_planner import FlowPlanner
from waterflow.engine.in_flight import StepsInFlight
from waterflow.engine.job_run import JobRun
from waterflow.engine.round_planner import RoundPlanner
from waterflow.engine.rounds import RoundExecutor
from waterflow.engine.states import JobState
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.run import rng
from waterflow.partitioner.policies import Policy
from waterflow.steps.prepared import PreparedBatch

#: A round waits this share of the last round for jobs whose next batch is about to be ready.
_GRACE = 0.25
_LEAST_GRACE_SECONDS = 0.002


class EngineLoop:
    """Drives the jobs of one engine on its own thread, which is lane 0.

    Everything that moves persistent tensors happens on it, between steps.

    Attributes:
        jobs: all that were submitted, in that order.
        broken: what has ended the engine, if it is no single job's error.
    """

    def __init__(self, context: RunContext, policy: Policy, admission: Admission) -> None:
        self._context = context
        self._policy = policy
        self._admission = admission
        self.round_planner = RoundPlanner(policy, context.lanes, context.residency)
        self.flow_planner = FlowPlanner(policy, context.lanes, context.residency)
        self._in_flight = StepsInFlight(context)
        self._rounds = RoundExecutor(context, self.round_planner, self._in_flight)
        self._flow = FlowExecutor(context, self.flow_planner, self._in_flight, policy.next_job)
        self.jobs: list[JobRun] = []
        self.broken: BaseException | None = None
        self._holds_admission = False
        self._closing = False
        self._over = threading.Event()
        context.events.subscribe(self._wake_at_the_end)
        self._thread = threading.Thread(target=self._run, name="waterflow-lane-0", daemon=True)

    # From any thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closing or self.broken is not None

    def add(self, job: JobRun) -> None:
        """A job was submitted. With the lock of the context's state held."""
        self.jobs.append(job)
        self._context.state.notify_all()

    def hold_admission(self) -> None:
        """Lets nobody in before `release_admission`."""
        self._holds_admission = True

    def release_admission(self) -> None:
        """Lets jobs in once all so far are captured and profiled, and each is known to fit alone.

        Raises:
            BudgetError: one of them does not; nothing has run.
        """
        with self._context.state:
            self._context.state.wait_for(lambda: all(map(self._is_prepared, self.jobs)))
        prepared = [job for job in self.jobs if not job.ended]
        if not all(map(self._admission.fits_alone, prepared)):
            raise BudgetError(self._admission.too_small(prepared))
        with self._context.state:
            self._holds_admission = False
            self._context.state.notify_all()

    def _is_prepared(self, job: JobRun) -> bool:
        return job.ended or self.broken is not None or job.next_batch() is not None

    def request_stop(self, job: JobRun) -> None:
        """Has the job end after its present step."""
        with self._context.state:
            job.stop_requested = True
            self._context.state.notify_all()

    def wait_for_end(self, job: JobRun, timeout: float | None) -> bool:
        """Waits until the job has ended and left; returns whether it has, within the timeout."""
        with self._context.state:
            return self._context.state.wait_for(lambda: job.is_gone or self._over.is_set(), timeout)

    def close(self) -> None:
        """Takes no more jobs, and ends when those there are have ended."""
        with self._context.state:
            self._closing = True
            self._context.state.notify_all()

    def join(self, timeout: float) -> bool:
        """Waits for the end of the thread's work; returns whether it has come."""
        return self._over.wait(timeout)

    def _wake_at_the_end(self, event: Event) -> None:
        if isinstance(event, StateChanged) and event.after.ended:
            self._context.wake()

    # The thread

    def _run(self) -> None:
        self._context.lanes.adopt_lane(0)
        try:
            while self._wait_for_work():
                self._between_steps()
                self._run_steps()
                self._dismiss_ended()
        except BaseException as error:
            self._break(error)
        finally:
            try:
                self._wind_up()
            finally:
                rng.uninstall()
                self._over.set()
                self._context.wake()

    def _break(self, error: BaseException) -> None:
        """The engine ends with an error that is no single job's."""
        try:
            self._context.check_device()
        except DeviceLostError as lost:
            lost.__cause__ = error if error is not lost else None
            error = lost
        self.broken = error
        for job in self.jobs:
            job.fail(error)

    def _wind_up(self) -> None:
        for job in self.jobs:
            if job.resident and not isinstance(self.broken, DeviceLostError):
                self._dismiss(job)
        self._context.events.publish(EngineEnded())
        self._context.lanes.close()
        for job in self.jobs:
            job.feeder.join(1.0)

    def _wait_for_work(self) -> bool:
        with self._context.state:
            self._context.state.wait_for(lambda: self._has_work() or self._is_over())
            return not self._is_over()

    def _is_over(self) -> bool:
        return self._closing and all(job.is_gone for job in self.jobs)

    def _has_work(self) -> bool:
        return self._in_flight.pending or any(map(self._needs_attention, self.jobs))

    def _needs_attention(self, job: JobRun) -> bool:
        if job.ended:
            return job.resident
        if job.stop_requested or (job.state is JobState.QUEUED and not job.feeder.started):
            return True
        if job.next_batch() is None:
            return False
        if job.state is JobState.RUNNING:
            return True
        return not (self._holds_admission or self._admission.is_waiting(job))

    # Coming and going

    def _between_steps(self) -> None:
        """Whoever comes and goes does so here."""
        for job in self.jobs:
            if job.state is JobState.QUEUED and not job.feeder.started:
                job.start()
        for job in self.jobs:
            if job.stop_requested and not job.ended:
                self._in_flight.complete_all()
                job.end(JobState.STOPPED)
        self._flow.close_rooms(self.jobs)
        if not self._holds_admission:
            self._admit()

    def _admit(self) -> None:
        """Admits waiting jobs in the order of their submission, as long as they fit."""
        for job in self.jobs:
            fed = job.next_batch()
            if job.resident or job.ended or fed is None:
                continue
            if fed.item is None:
                self._end_of_data(job, fed)
                continue
            residents = self._residents()
            try:
                self._admission.check(job, residents)
            except (BudgetError, JobError) as error:
                job.fail(error)
                continue
            if not self._admission.fits_beside(job, residents):
                self._admission.wait(job)
                if job.state is JobState.PREPARING:
                    job.become(JobState.QUEUED)
                return
            self._let_in(job)

    def _residents(self) -> list[JobRun]:
        return [job for job in self.jobs if job.resident]

    def _let_in(self, job: JobRun) -> None:
        context = self._context
        job.tell_of_needs()
        job.become(JobState.RUNNING)
        try:
            context.lanes.commit()
            job.move_in(context.residency)
            job.captured.open_input(None, context.lanes, context.residency)
        except (RuntimeError, JobError) as error:
            job.fail(error)
            context.check_device()
        context.lanes.device.release_unused()

    def _dismiss_ended(self) -> None:
        for job in self.jobs:
            if job.ended and job.resident:
                self._dismiss(job)

    def _dismiss(self, job: JobRun) -> None:
        job.move_out(self._context.residency)
        self._admission.somebody_left()
        self._context.wake()

    def _end_of_data(self, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        self._in_flight.complete_all()
        if fed.error is not None:
            job.fail(fed.error)
        else:
            self._context.run_isolated(job, lambda: job.loop.enter_epoch(job.loop.epoch + 1))
            job.end(JobState.FINISHED)

    # Steps

    def _run_steps(self) -> None:
        """A round of all jobs; or, under a policy that lets jobs flow, a round of those that need
        more than a lane, and then a stretch in which the others flow."""
        if not self._policy.flows:
            self._run_round(self.jobs)
            return
        self._flow.open_rooms(self._residents())
        apart = [job for job in self.jobs if job.may_step and not job.can_flow]
        if apart:
            self._flow.close_rooms(self.jobs)
            self._run_round(apart)
            self._dismiss_ended()  # others may need its place
            self._flow.open_rooms(self._residents())
        flowing = [job for job in self.jobs if job.can_flow]
        if any(job.may_step for job in flowing):
            self._run_stretch(flowing)

    def _run_stretch(self, jobs: Sequence[JobRun]) -> None:
        self._in_flight.complete_all()
        left = self._flow.run(jobs, lambda: self._is_interrupted(jobs))
        self._dismiss_ended()
        if left is None:
            self._flow.close_rooms(self.jobs)
            self._run_round(jobs)
        elif left:
            self._flow.close_rooms(self.jobs)
            self._rounds.run(left)

    def _is_interrupted(self, flowing: Sequence[JobRun]) -> bool:
        """Whether somebody wants something that cannot be done while jobs flow."""
        return any(
            job.stop_requested if job in flowing else self._needs_attention(job)
            for job in self.jobs
        )

    def _run_round(self, jobs: Sequence[JobRun]) -> None:
        batches = self._next_batches(jobs)
        if batches:
            self._rounds.run(batches)
        else:
            self._in_flight.complete_all()

    def _next_batches(self, jobs: Sequence[JobRun]) -> Batches:
        """Their next batches. Jobs that are nearly ready are waited for, a little."""
        patience = max(_LEAST_GRACE_SECONDS, _GRACE * self._rounds.seconds)
        running = [job for job in jobs if job.state is JobState.RUNNING]
        with self._context.state:
            if any(job.may_step for job in running):
                self._context.state.wait_for(lambda: all(job.may_step for job in running), patience)
        batches: Batches = []
        for job in running:
            if not job.may_step:
                continue
            fed = job.feeder.take()
            if fed.item is None:
                self._end_of_data(job, fed)
                continue
            epoch = fed.epoch
            if self._context.run_isolated(job, lambda j=job, e=epoch: j.loop.enter_epoch(e)):  # type: ignore[misc]
                batches.append((job, fed.item))
        return batches
