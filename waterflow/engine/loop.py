"""The engine's own thread: has jobs let in and out, and the executors run their steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from waterflow.common import forks, garbage
from waterflow.common.errors import DeviceLostError
from waterflow.engine.admission import Admission
from waterflow.engine.alarms import Alarms
from waterflow.engine.context import RunContext
from waterflow.engine.entrance import Entrance
from waterflow.engine.flow import Batches, FlowExecutor
from waterflow.engine.flow_planner import FlowPlanner
from waterflow.engine.in_flight import StepsInFlight, pass_boundary
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.limits import Limits
from waterflow.engine.memory_trials import MemoryTrials
from waterflow.engine.ramp import Ramp
from waterflow.engine.round_planner import RoundPlanner
from waterflow.engine.rounds import RoundExecutor
from waterflow.engine.states import JobState
from waterflow.engine.surges import Surges
from waterflow.engine.turns import Turns
from waterflow.executor.run import rng
from waterflow.job.evaluation import Evaluated
from waterflow.partitioner.policies import Policy
from waterflow.report.idle import IdleReason

#: A round waits this share of the last round for jobs whose next batch is about to be ready.
_GRACE = 0.25
_LEAST_GRACE_SECONDS = 0.002

#: The thread ends within this time, once all is over.
_LAST_SECONDS = 1.0


class EngineLoop:
    """Drives the jobs of one engine on its own thread, which is lane 0.

    Everything that moves persistent tensors happens on it, between steps.
    """

    def __init__(
        self,
        context: RunContext,
        policy: Policy,
        admission: Admission,
        queue: JobQueue,
        undoes_packing: bool,
        alarms: Alarms,
    ) -> None:
        self._alarms = alarms
        self._context = context
        self._policy = policy
        self._queue = queue
        self.round_planner = RoundPlanner(policy, context.lanes, context.residency)
        self.flow_planner = FlowPlanner(policy, context.lanes, context.residency)
        self._in_flight = StepsInFlight(context)
        self._entrance = Entrance(context, queue, admission, self._in_flight)
        self._turns = Turns(policy, queue, admission, context.events)
        self.limits = Limits(context, queue, admission, takes_turns=policy.quantum is not None)
        self._surges = Surges(context, queue, admission, self.limits)
        self._trials = MemoryTrials(context, queue, admission, self.limits)
        queue.is_due = lambda: self._surges.are_over() or self._trials.are_over()
        self._rounds = RoundExecutor(
            *(context, self.round_planner, self._in_flight),
            lambda job, batch, cause: admission.no_place(job, batch, queue.jobs, cause),
            self._surges.grow,
        )
        self._flow = FlowExecutor(
            context,
            self.flow_planner,
            self._in_flight,
            policy.next_job,
            self._entrance.dismiss,
            self._surges.grow,
            undoes_packing,
        )
        self._ramp = Ramp(context.lanes.lanes)
        self._thread = threading.Thread(target=self._run, name="waterflow-lane-0", daemon=True)

    @property
    def idle_seconds(self) -> dict[IdleReason, float]:
        """The time of lanes that ran no step while jobs flowed, by the reason."""
        with self._context.state:
            return self._flow.idle.seconds(self.flow_planner.waited_seconds)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread, which has no more to do."""
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        self._context.lanes.adopt_lane(0)
        try:
            while self._queue.wait_for_work(self._in_flight.pending):
                self._between_steps()
                self._run_steps()
                self._entrance.dismiss_ended()
                self._queue.let_go_of_errors()
        except BaseException as error:
            self._break(error)
        finally:
            try:
                self._wind_up()
            finally:
                rng.uninstall()
                forks.uninstall()
                garbage.uninstall()
                self._queue.end()

    def _break(self, error: BaseException) -> None:
        """The engine ends with an error that is no single job's."""
        try:
            self._context.check_device()
        except DeviceLostError as lost:
            lost.__cause__ = error if error is not lost else None
            error = lost
        self._queue.broken = self._alarms.engines_error = error
        for job in self._queue.everybody:
            job.fail(error)

    def _wind_up(self) -> None:
        try:
            if not isinstance(self._queue.broken, DeviceLostError):
                self._entrance.dismiss_ended()
            self._surges.finish()
        finally:
            self._context.events.end()
        self._context.lanes.close()
        self._queue.join_feeders(1.0)

    def _between_steps(self) -> None:
        """Whoever comes and goes does so here."""
        self._entrance.start_new()
        self._entrance.end_stopped()
        self._grant_wishes()
        self._surges.next()
        self._trials.next()
        self._turns.next()
        self._entrance.suspend_and_resume()
        self._flow.close_rooms(self._queue.jobs)
        self._entrance.admit()

    def _grant_wishes(self) -> None:
        while (wish := self._queue.next_wish()) is not None:
            self._in_flight.complete_all()
            self._context.arena.synchronize()
            wish.grant()
            self._context.wake()

    def _run_steps(self) -> None:
        """A round of all jobs; or, under a policy that lets jobs flow, a round of those that need
        more than a lane, and then a stretch in which the others flow. Captured steps that only lack
        their tensors get them first: their check is then a step that flows."""
        if not self._policy.flows:
            self._run_round(self._queue.jobs)
            return
        for job in self._queue.jobs:
            if job.may_step:
                self._context.run_isolated(job, job.make_ready, self._context.residency)
        self._flow.open_rooms(self._entrance.residents)
        jobs = self._ramp.choose(self._queue.jobs)
        apart = [job for job in jobs if job.may_step and not job.can_flow]
        if apart:
            self._flow.close_rooms(self._queue.jobs)
            self._run_round(apart)
            self._entrance.dismiss_ended()  # others may need its place
            self._flow.open_rooms(self._entrance.residents)
        flowing = [job for job in jobs if job.can_flow]
        if any(job.may_step for job in flowing):
            self._run_stretch(flowing)

    def _run_stretch(self, jobs: Sequence[JobRun]) -> None:
        self._in_flight.complete_all()
        left = self._flow.run(jobs, self._interruption(jobs))
        self._entrance.dismiss_ended()
        if left is None:
            self._flow.close_rooms(self._queue.jobs)
            self._run_round(jobs)
        elif left:
            self._flow.close_rooms(self._queue.jobs)
            self._rounds.run(left)

    def _interruption(self, jobs: Sequence[JobRun]) -> Callable[[], bool]:
        """Tells whether somebody wants something that cannot be done while these jobs flow. There
        may be hundreds, so it looks at them only when somebody has called."""
        flowing, calls = frozenset(jobs), -1
        called_away, others = False, list[JobRun]()

        def is_interrupted() -> bool:
            nonlocal calls, called_away, others
            if calls != self._context.calls.calls:
                calls = int(self._context.calls.calls)
                called_away = self._queue.has_wishes or any(
                    job.is_called_away for job in flowing if not job.ended
                )
                known = flowing.union(self._ramp.waiting)
                others = [j for j in self._queue.jobs if not (j in known or j.is_gone)]
            return (
                called_away
                or self._turns.are_over()
                or self._surges.are_over()
                or self._trials.are_over()
                or self._queue.may_take
                or self._ramp.is_due(flowing)
                or any(map(self._queue.needs_attention, others))
            )

        return is_interrupted

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
        if self._surges.is_pending():  # what they wait for has come, and asks for more
            return []
        batches: Batches = []
        for job in running:
            if not job.may_step:
                continue
            fed = job.feeder.take()
            if fed.boundary:
                evaluate = functools.partial(self._evaluate, job)
                pass_boundary(self._context, self._in_flight, job, fed, evaluate)
                continue
            if fed.item is None:
                self._entrance.end_of_data(job, fed)
                continue
            batches.append((job, fed))
        return batches

    def _evaluate(self, job: JobRun) -> Evaluated:
        """Evaluates a job while nobody is in a step."""
        context, lanes = self._context, self._context.lanes
        if not lanes.device.queues:
            job.evaluator.open_room(lanes, 0)
            try:
                return job.evaluator.run_in_room(
                    lanes, lambda room, size: self._surges.grow(job, room, size, [job])
                )
            finally:
                job.evaluator.close_room()
        self._in_flight.complete_all()
        context.arena.synchronize()
        try:
            return job.evaluator.run_in(lanes.scope(job.number))
        finally:
            context.arena.synchronize()
