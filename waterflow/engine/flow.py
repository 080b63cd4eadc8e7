"""Lets jobs flow: every lane takes one step after another, beside the other lanes and their steps.

Rounds and flowing take turns. While jobs flow, no persistent tensor comes, goes or moves: whatever
needs that (a job that joins or ends, a step that is new) ends the stretch, and the engine sees to
it while no step is under way.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.common import garbage
from waterflow.engine.context import GrowRoom, RunContext
from waterflow.engine.eager_train import account_for_room, run_train
from waterflow.engine.events import GroupsRan, ShareChanged
from waterflow.engine.flow_planner import FlowPlanner
from waterflow.engine.idle import IdleTimes, why_idle
from waterflow.engine.in_flight import (
    Launch,
    ScheduledStep,
    StepsInFlight,
    pass_boundary,
    run_eager_step,
)
from waterflow.engine.job_run import JobRun
from waterflow.engine.packing import Packing
from waterflow.engine.precedence import Precedence
from waterflow.engine.trains import Trains
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.plan.flow_plan import FlowPlan
from waterflow.executor.run.eager_room import EagerRoom
from waterflow.job.evaluation import Evaluated
from waterflow.partitioner.policies.fair_share import NextJob, Share, newcomer
from waterflow.steps.prepared import PreparedBatch

Batches = list[tuple[JobRun, FeedItem[PreparedBatch]]]


class FlowExecutor:
    """Runs the stretches of one engine in which jobs flow."""

    def __init__(
        self,
        context: RunContext,
        planner: FlowPlanner,
        in_flight: StepsInFlight,
        next_job: NextJob,
        dismiss: Callable[[JobRun], None],
        grow: GrowRoom,
        undoes_packing: bool,
    ) -> None:
        """Args beyond the obvious.

        dismiss: has a job that has ended give up its places.
        grow: enlarges the room of a job's eager step, see `Surges.grow`.
        undoes_packing: whether jobs may be made to take turns.
        """
        self._context = context
        self._grow = grow
        self._planner = planner
        self._in_flight = in_flight
        self._next_job = next_job
        self._dismiss = dismiss
        self._shares: dict[str, Share] = {}
        self._jobs: Sequence[JobRun] = ()  # of the present stretch; none between two
        self._precedence = Precedence(context)
        self._packing = Packing(context, undoes_packing)
        self.idle = IdleTimes()
        if context.lanes.device.queues:  # elsewhere the lanes tell
            context.events.subscribe(self._count, GroupsRan)
        context.events.subscribe(self._change, ShareChanged)

    def _count(self, event: GroupsRan) -> None:
        """What jobs have of the device while they flow."""
        for _, place, _, start, stop in event.spans if self._jobs else ():
            self._charge(event.jobs[place], stop - start)

    def _charge(self, name: str, seconds: float) -> None:
        """A job has had so many seconds of a lane."""
        self._shares[name] = self._shares[name].after(seconds)

    def _change(self, event: ShareChanged) -> None:
        """A job goes before others than it did; with the engine's lock held."""
        for job in self._jobs:
            self._shares[job.name] = job.share_now(self._shares[job.name])
        self._precedence.begin(self._jobs)

    def open_rooms(self, jobs: Sequence[JobRun]) -> None:
        """Sets memory aside for the eager steps of jobs, as far as it leaves enough for the others,
        so that they can flow. Between stretches only. Where no captured step has a plan for the
        memory, each train sets aside its own."""
        steps = [step for job in jobs for step in job.captured.bound]
        left = max((step.memory.extent for step in steps), default=0)
        for job in jobs:
            job.eager.room_on_demand = not steps
            if steps and not job.ended:
                job.eager.open_room(self._context.lanes, left)
                job.evaluator.open_room(self._context.lanes, left)

    def close_rooms(self, jobs: Sequence[JobRun]) -> None:
        """Gives that memory back. Between stretches only."""
        for job in jobs:
            job.eager.room_on_demand = False
            job.eager.close_room()
            job.evaluator.close_room()

    def run(self, jobs: Sequence[JobRun], interrupted: Callable[[], bool]) -> Batches | None:
        """Lets these jobs flow until something else has to be done; then whoever can and has not
        had a step yet gets one.

        Args:
            jobs: that can flow, one of them at least ready for it.
            interrupted: whether the engine has something to do; asked with the engine's lock.

        Returns:
            Batches that were taken, but could not flow after all; None where the jobs find no room
            for their piles, and nothing has run.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        plan = self._planner.plan(jobs)
        if plan is None and any(job.captured.steady for job in jobs):
            return None
        if plan is not None:
            plan.open()
        known = {job.name: self._shares[job.name] for job in jobs if job.name in self._shares}
        self._shares = {
            job.name: job.share_now(known.get(job.name) or newcomer(job.weight, known.values()))
            for job in jobs
        }
        with self._context.state:
            self._precedence.begin(jobs)
            self._packing.begin(jobs)
        stretch = _Stretch(
            *(self._context, plan, self._in_flight, jobs, interrupted, self._choose),
            *(self.idle, self._dismiss, self._precedence, self._packing, self._grow, self._charge),
        )
        self._context.arena.synchronize()  # what was done on lane 0 comes first
        self._jobs = jobs
        try:
            self._context.lanes.run_on_all(stretch.serve)
            self._in_flight.complete_all()
        finally:
            self._jobs = ()
            with self._context.state:
                self._precedence.end()
                self._packing.end()
        self._context.arena.synchronize()
        return stretch.left

    def _choose(self, waiting: Sequence[JobRun]) -> JobRun:
        return waiting[self._next_job([self._shares[job.name] for job in waiting])]


class _Stretch:
    """One stretch of flowing steps. `RunContext.state` guards what its lanes share."""

    def __init__(
        self,
        context: RunContext,
        plan: FlowPlan | None,
        in_flight: StepsInFlight,
        jobs: Sequence[JobRun],
        interrupted: Callable[[], bool],
        choose: Callable[[Sequence[JobRun]], JobRun],
        idle: IdleTimes,
        dismiss: Callable[[JobRun], None],
        precedence: Precedence,
        packing: Packing,
        grow: GrowRoom,
        charge: Callable[[str, float], None],
    ) -> None:
        """Args beyond the obvious.

        charge: told which job has had so many seconds of a lane.
        """
        self._context = context
        self._charge = charge
        self._dismiss = dismiss
        self._grow = grow
        self._precedence = precedence
        self._packing = packing
        self._plan = plan
        self._in_flight = in_flight
        self._trains: Trains | None = None
        if plan is not None and not context.lanes.device.queues:
            self._trains = Trains(context, plan, in_flight)
        #: Their batches; without jobs that have ended. There may be hundreds, and each free lane
        #: looks at all of them, so that nothing else is looked at.
        self._queues = {job: job.feeder.ready for job in jobs}
        self._ended: list[JobRun] = []  # that nobody has looked at since
        self._interrupted = interrupted
        self._choose = choose
        self._idle = idle
        self._over = False  # something else is to be done
        self._ending = False  # no step begins any more
        self._busy: dict[JobRun, int] = {}  # and which thread is busy with it
        self._eager: set[JobRun] = set()  # those of them whose steps are eager Python
        self._growing: set[JobRun] = set()  # those of them that wait for a larger room
        self._captured = 0  # captured steps under way
        self._stepped: set[JobRun] = set()
        self._flows: dict[JobRun, bool] = {}  # as was found last, when the stretch was over
        self.left: Batches = []

    def serve(self, lane: int) -> None:
        """Runs steps on this lane until the stretch is over."""
        try:
            while (taken := self._next(lane)) is not None:
                job, fed, seen = taken
                captured, since = self._is_captured(job, fed), _seconds()
                serve = self._run_captured if captured else self._serve_eager
                try:
                    self._context.run_isolated(job, serve, lane, job, fed, seen)
                finally:
                    self._give_back(job, captured, _seconds() - since)
        except BaseException:
            self._end()
            raise

    def _serve_eager(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch], _: int) -> None:
        if fed.boundary:
            evaluate = functools.partial(self._evaluate, job)
            pass_boundary(self._context, self._in_flight, job, fed, evaluate)
        else:
            self._run_eager(lane, job, fed)

    # Who runs next

    def _next(self, lane: int) -> tuple[JobRun, FeedItem[PreparedBatch], int] | None:
        """Waits for a job that may run on this lane and takes its batch, after so many calls
        (`RunContext.calls`); None when all is over."""
        with self._context.state:
            while not self._ending:
                seen = int(self._context.calls.calls)
                waiting = self._with_batches()
                if self._is_over():
                    waiting = [job for job in waiting if self._may_have_last_step(job)]
                able = self._precedence.candidates(waiting, self._busy)
                able = self._packing.candidates(able, self._busy)
                job = self._choose_for(lane, able)
                if job is not None and job.ended:
                    self._drop(job)
                elif job is not None and job.can_flow:
                    return job, self._take(job), seen
                elif job is not None:  # whatever it was when it was looked at before
                    self._flows[job] = False
                    self._set_over(True)
                elif self._over:
                    self._end()
                else:
                    self._wait(self._precedence.rest(waiting))
        return None

    def _wait(self, seconds: float | None) -> None:
        """Waits until there may be something for this lane."""
        queues, busy = self._queues.items(), self._busy
        lack = [job for job, batches in queues if not batches and job not in busy]
        if ended := [job for job in lack if job.ended]:
            for job in ended:
                self._drop(job)
            return
        since, reason = time.perf_counter(), why_idle(lack)
        self._context.state.wait(seconds)
        self._idle.note(reason, since)

    def _with_batches(self) -> list[JobRun]:
        """The jobs that have a batch, and are not known to wait for other lanes' Python."""
        busy, eager = self._busy, self._eager
        fine = any(job.eager.is_fine for job in eager)
        if fine and self._plan is None:  # no step is captured: all go in turn
            return []
        ready = [job for job, batches in self._queues.items() if batches and job not in busy]
        if not eager:
            return ready
        return [job for job in ready if not (job.next_is_eager and (fine or job.eager.is_fine))]

    def _choose_for(self, lane: int, waiting: list[JobRun]) -> JobRun | None:
        """Of these the job that runs next, where one can on this lane. There may be hundreds, so
        only those whose turn it is are looked at closely."""
        while waiting:
            job = self._choose(waiting)
            fed = job.next_batch()
            assert fed is not None
            if self._may_run(lane, job, fed):
                return job
            waiting.remove(job)
        return None

    def _may_run(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]) -> bool:
        """Whether this step can be made on the lane, whatever its job may."""
        if self._is_captured(job, fed):
            return self._plan is None or lane < self._plan.lanes
        others = [other.eager.casts for other in self._eager]
        return not any(map(job.eager.casts.disturb, others)) if others else True

    def _is_captured(self, job: JobRun, fed: FeedItem[PreparedBatch]) -> bool:
        return fed.item is not None and not job.eager.needs_lane_only(fed.item)

    def _is_over(self) -> bool:
        deviated = self._plan is not None and self._plan.deviated
        # Those that have left the arena, too, are nobody's concern any more.
        holds = any(job.resident for job in self._ended)
        self._ended.clear()
        self._set_over(deviated or holds or not self._queues or self._interrupted())
        return self._over

    def _drop(self, job: JobRun) -> None:
        """A job that no lane is busy with has ended."""
        if self._queues.pop(job, None) is not None:
            self._ended.append(job)

    def _set_over(self, over: bool) -> None:
        if over and not self._over:
            self._over = True
            self._context.calls.call()

    def _may_have_last_step(self, job: JobRun) -> bool:
        """Whoever has not had a step yet gets one: else others could starve him."""
        if job in self._stepped or job.is_called_away:
            return False
        if job not in self._flows:  # a close look, at hundreds of jobs perhaps
            self._flows[job] = job.can_flow
        return self._flows[job]

    def _take(self, job: JobRun) -> FeedItem[PreparedBatch]:
        self._busy[job] = threading.get_ident()
        fed = job.feeder.take()
        if not fed.boundary:
            self._stepped.add(job)
        if self._is_captured(job, fed):
            self._captured += 1
        else:
            self._eager.add(job)
        self._precedence.takes_lane(job, None if fed.item is None else fed.item.specialization)
        self._packing.takes_lane(job)
        return fed

    def _give_back(self, job: JobRun, captured: bool, seconds: float) -> None:
        with self._context.state:
            if not self._context.lanes.device.queues:  # else the device tells
                self._charge(job.name, seconds)
            self._busy.pop(job, None)
            self._eager.discard(job)
            self._captured -= captured
            self._precedence.gives_lane_back(job)
            self._packing.gives_lane_back(job)
            if job.ended:
                self._drop(job)
            self._context.state.notify_all()
            if self._growing:
                self._context.outside.notify_all()

    def _end(self) -> None:
        with self._context.state:
            self._ending = True
            self._context.wake()

    # How a step runs

    def _run_captured(
        self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch], seen: int
    ) -> None:
        if self._trains is None:
            self._run_step(lane, job, fed)
            return
        since = time.perf_counter()
        left, busy = self._trains.run(lane, job, fed, seen)
        with self._context.state:
            self._idle.note("python", since + busy)
        if left is not None:
            self.left.append((job, left))
            self._end()

    def _run_step(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        assert fed.item is not None
        assert self._plan is not None
        with self._context.python:
            begun = self._context.run_isolated(job, self._begin, lane, job, fed)
        if begun is not None and begun.value is None:
            self.left.append((job, fed))
            self._end()
        elif begun is not None and begun.value is not None:
            scheduled, flow_step = begun.value
            former = self._in_flight.result_of(job)
            result = self._context.lanes.run_step(lane, flow_step, self._plan.gate, former)
            launch = Launch(result, [scheduled])
            if not launch.has_failed:
                job.captured.send_ahead(job.next_batch())
            self._in_flight.settle(launch)

    def _begin(
        self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]
    ) -> tuple[ScheduledStep, Any] | None:
        """The step and its form for the lane; None where it needs more than a lane after all."""
        assert fed.item is not None
        assert self._plan is not None
        job.loop.enter_epoch(fed.epoch)
        step = job.captured.ready_step(fed.item)
        if step is None or not self._plan.has(step.compiled):
            return None
        job.captured.load(step, fed.item)
        flow_step = self._plan.begin(step.compiled, lane, own_blocks=not self._context.check)
        return ScheduledStep(job, step, fed.item, job.loop.rates()), flow_step

    def _run_eager(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        """Steps in the user's Python, which no other lane waits for."""
        batch = fed.item
        assert batch is not None
        needs_room, on_demand = batch.specialization is None, job.eager.room_on_demand
        if needs_room and not job.eager.open_room(self._context.lanes, 0):
            self.left.append((job, fed))
            self._end()
        else:
            run = self._run_train if batch.is_plainly_eager else self._run_eager_step
            job.throttle.begin()
            try:
                run(lane, job, fed)
            finally:
                job.throttle.end()
            if needs_room and on_demand:
                job.eager.close_room()
                self._settle(job)
            with self._context.state:
                self._set_over(not (job.ended or job.eager.is_as_found))

    def _settle(self, job: JobRun) -> None:
        """After eager steps, while no plan counts on the memory as it is: what they have kept is
        accounted for, and a job that has ended leaves, while the stretch goes on."""
        account_for_room(self._context, job)
        if job.ended:
            with self._context.python:
                self._dismiss(job)

    def _run_train(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        assert job.eager.room is not None
        room = job.eager.room
        memory = room.scope(lambda size: self._make_room(job, room, size))
        accounts = job.eager.room_on_demand

        def may_go_on() -> bool:
            if self._over or not self._precedence.is_needed:
                return not self._over
            return not self._precedence.wants(job, self._busy) and self._precedence.may_begin(job)

        run_train(
            *(self._context, job, lane, fed, memory, may_go_on),
            accounts=accounts,
            beside=lambda: len(self._eager),
        )

    def _run_eager_step(self, lane: int, job: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        """One that is to be checked, or to show whether others may be traced."""
        batch = fed.item
        assert batch is not None

        def more(size: int) -> bool:
            assert job.eager.room is not None
            return self._make_room(job, job.eager.room, size)

        step = functools.partial(_make_eager_step, job, batch, fed.epoch, more)
        run_eager_step(self._context, job, lane, step, at_home=batch.specialization is None)
        job.feeder.step_done()  # callbacks come before the next batch is fetched

    def _evaluate(self, job: JobRun) -> Evaluated:
        """Evaluates a job while others are in their steps."""
        evaluator, lanes = job.evaluator, self._context.lanes
        on_demand = job.eager.room_on_demand
        if on_demand:
            evaluator.open_room(lanes, 0)
        job.throttle.begin()
        try:
            return evaluator.run_in_room(lanes, lambda room, size: self._make_room(job, room, size))
        finally:
            job.throttle.end()
            if on_demand:
                evaluator.close_room()

    def _make_room(self, job: JobRun, room: EagerRoom, size: int) -> bool:
        """Enlarges the room of an eager step that needs more than any before it.

        Captured steps keep their places by plan, so the memory between them is nobody's to take
        while one is under way: this ends the stretch and waits for those that are.
        """
        with PYTHON_TURNS.paused(), self._context.state:
            self._end()
            self._growing.add(job)
            self._context.outside.notify_all()  # as a callback may be asked of this thread
            with self._precedence.stands_aside(job):
                self._context.outside.wait_for(self._is_quiet)
            self._growing.discard(job)
            self._context.arena.synchronize()  # who is behind his step may still have it queued
            if self._plan is not None:  # or is about to begin one
                self._plan.end()
            # Whoever waits for this thread to make his callback is in the middle of something, too.
            return self._grow(job, room, size, [*self._busy])

    def _is_quiet(self) -> bool:
        """Whether nobody is in a step but those who wait for memory."""
        if self._captured == 0 and self._eager <= self._growing:
            return True
        callbacks = self._context.callbacks
        if not callbacks.in_caller or callbacks.job_here is None:
            return False
        # This thread makes all callbacks: whoever waits for one is behind his step until it can.
        return all(
            job in self._growing or callbacks.is_behind(job.name, (lane, job.feeder.thread.ident))
            for job, lane in self._busy.items()
        )


def _make_eager_step(
    job: JobRun, batch: PreparedBatch, epoch: int, more: Callable[[int], bool]
) -> tuple[float, tuple[float, ...]]:
    job.loop.enter_epoch(epoch)
    rates = job.loop.rates()
    return job.eager.run_on_lane(batch, more), rates


def _seconds() -> float:
    """The time, less the pauses of the process for which no job can be charged."""
    return time.perf_counter() - garbage.paused_seconds()
