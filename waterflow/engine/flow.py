"""Lets jobs flow: every lane takes one step after another, beside the other lanes and their steps.

Rounds and flowing take turns. While jobs flow, no persistent tensor comes, goes or moves:
whatever needs that (a job that joins or ends, a step that is new) ends the stretch, and the engine
sees to it while no step is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from waterflow.capture.side_effects import PYTHON_TURNS
from waterflow.engine.job_run import JobRun
from waterflow.engine.recorder import Recorder
from waterflow.engine.rounds import Guard
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.plan.headroom import FlowJob, choose_headroom
from waterflow.executor.plan.piled_step import FlowPlan, Piles
from waterflow.executor.plan.round_plan import layout_key, live_end
from waterflow.executor.run.eager_room import EagerRoom
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.steps.step_cache import PreparedBatch, PreparedStep


@dataclass
class _Queued:
    """A step whose loss has not been read yet."""

    result: Any
    rates: tuple[float, ...]
    batch: PreparedBatch  # kept, as the device may still read it


_Begun = tuple[PreparedStep, Any, tuple[float, ...]]
"""A step, its form for its lane, and the learning rates that it runs with."""


class FlowExecutor:
    """Runs stretches of flowing steps for one engine."""

    def __init__(
        self,
        lanes: Lanes,
        residency: Residency,
        recorder: Recorder,
        state: threading.Condition,
        *,
        check: bool,
        guard: Guard,
        show: Callable[[JobRun], None],
        check_device: Callable[[], None],
    ) -> None:
        """Args beyond the obvious.

        state: the engine's; notified when a feeder has a batch and when somebody wants something.
        check: every block goes through the arena, whose log is judged later.
        guard: runs something of a user's; an error ends that job alone, and False is returned.
        show: tells the user of a job's progress.
        check_device: raises DeviceLostError where the device is lost.
        """
        self._lanes = lanes
        self._residency = residency
        self._recorder = recorder
        self._state = state
        self._check = check
        self._guard = guard
        self._show = show
        self._check_device = check_device
        # What users wrote, and all that is done for a job in Python, runs one at a time.
        self._python = threading.RLock()
        self._plan: FlowPlan | None = None
        self._plan_key: Hashable = None
        self._past = (0, 0)  # waits and deviations of former plans
        self._members: Sequence[JobRun] = ()
        self._interrupted: Callable[[], bool] = lambda: False
        self._over = False  # something else is to be done
        self._ending = False
        self._busy: set[JobRun] = set()
        self._captured = 0  # captured steps under way
        self._stepped: set[JobRun] = set()  # in this stretch
        self._left: list[tuple[JobRun, PreparedBatch]] = []
        self._used: dict[JobRun, float] = {}  # seconds of lanes, by the job's weight
        self._queued: dict[JobRun, _Queued] = {}

    @property
    def waits(self) -> int:
        """How often a node group has waited for memory that the other lane held."""
        return self._past[0] + (int(self._plan.gate.waits) if self._plan else 0)

    @property
    def deviations(self) -> int:
        """Requests for memory that were not as profiled."""
        return self._past[1] + (self._plan.deviations if self._plan else 0)

    def can_flow(self, member: JobRun) -> bool:
        """Whether the job's next turn needs nothing but its lane, as far as is known by now."""
        if not member.admitted or member.ended:
            return False
        fed = member.next_turn()
        if fed is None:  # one that waits for its data flows with the others when it comes
            captured = not member.exclusive and any(not s.creates_state for s in member.bound)
            return captured or (member.room is not None and member.room.is_open)
        if fed.item is None:
            return False
        return member.ready_step(fed.item) is not None or member.runs_on_its_lane(fed.item)

    def open_rooms(self, members: Sequence[JobRun]) -> None:
        """Sets memory aside for the eager steps of jobs, as far as it leaves enough for the others,
        so that they can flow. Between stretches only."""
        steps = [step for member in members for step in member.bound]
        left = max((step.memory.extent for step in steps), default=0)
        for member in members:
            need = member.eager_bytes
            if need is None or member.ended:
                continue
            if member.room is None:
                member.room = EagerRoom(self._lanes, member.number, member.name)
            if not member.room.is_open:
                member.room.open(need, left)

    def close_rooms(self, members: Sequence[JobRun]) -> bool:
        """Gives that memory back; returns whether there was any. Between stretches only."""
        rooms = [m.room for m in members if m.room is not None and m.room.is_open]
        for room in rooms:
            room.close()
        return bool(rooms)

    def run(self, members: Sequence[JobRun], interrupted: Callable[[], bool]) -> bool:
        """Lets these jobs flow until something else has to be done; then whoever can and has not
        had a step yet gets one.

        Args:
            members: jobs that can flow, one of them at least ready for it.
            interrupted: whether the engine has something to do; asked with the engine's lock.

        Returns:
            False where they find no room for their piles; then nothing has run.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        plan = self._plan_for(members)
        if plan is None and any(not member.exclusive for member in members):
            return False
        if plan is not None:
            plan.open()
        self._members, self._interrupted = members, interrupted
        self._over = self._ending = False
        self._captured = 0
        self._stepped.clear()
        newest = min((self._used[m] for m in members if m in self._used), default=0.0)
        self._used = {member: self._used.get(member, newest) for member in members}
        self._lanes.arena.synchronize()  # what was done on lane 0 comes first
        try:
            self._lanes.run_on_all(lambda lane: self._serve(lane, plan))
        finally:
            self._busy.clear()
        for member in list(self._queued):
            self._conclude(member)
        self._lanes.arena.synchronize()
        return True

    def take_left(self) -> list[tuple[JobRun, PreparedBatch]]:
        """Turns that were taken, but could not flow after all."""
        left, self._left = self._left, []
        return left

    # The plan

    def _plan_for(self, members: Sequence[JobRun]) -> FlowPlan | None:
        steps = [(m, step) for m in members for step in m.bound if not step.creates_state]
        key = (layout_key(self._lanes.arena), tuple(step for _, step in steps))
        if key != self._plan_key:
            if self._plan is not None:
                self._past = (self.waits, self.deviations)
            self._plan = self._make_plan(steps) if steps else None
            self._plan_key = layout_key(self._lanes.arena), key[1]
        return self._plan

    def _make_plan(self, steps: Sequence[tuple[JobRun, PreparedStep]]) -> FlowPlan | None:
        arena = self._lanes.arena
        lowest = max(step.memory.extent for _, step in steps)
        if lowest > self._room():
            self._residency.repack()  # gaps between persistent tensors may be what is in the way
        room = self._room()
        choice = choose_headroom(_flow_jobs(steps), room, self._lanes.lanes)
        if choice is None:
            return None
        flowing = [
            ((member.number, step.compiled, step.memory), step.piles.at(choice.headroom, room))
            for member, step in steps
        ]
        return FlowPlan(arena, self._lanes.lanes, flowing)

    def _room(self) -> int:
        arena = self._lanes.arena
        return int(arena.statistics().capacity) - live_end(arena)

    # A lane, while jobs flow

    def _serve(self, lane: int, plan: FlowPlan | None) -> None:
        served = plan is None or lane < plan.lanes
        try:
            while (turn := self._next(lane, plan, served)) is not None:
                member, fed = turn
                if self._is_captured(member, fed):
                    assert plan is not None
                    self._run_step(lane, plan, member, fed)
                else:
                    self._run_eager_step(lane, member, fed)
        except BaseException:
            self._end_stretch()
            raise

    def _is_captured(self, member: JobRun, fed: FeedItem[PreparedBatch]) -> bool:
        return fed.item is not None and not member.runs_on_its_lane(fed.item)

    def _next(
        self, lane: int, plan: FlowPlan | None, captured: bool
    ) -> tuple[JobRun, FeedItem[PreparedBatch]] | None:
        """Waits for a job's turn and takes it; None when the stretch is over.

        Args:
            lane: whose turn.
            plan: of the captured steps.
            captured: whether the lane has room for them.
        """
        with self._state:
            while not self._ending:
                waiting = [
                    m
                    for m in self._members
                    if m not in self._busy
                    and (fed := m.next_turn())
                    and (captured if self._is_captured(m, fed) else m.may_run_on(lane))
                ]
                if self._is_over(plan):
                    waiting = [m for m in waiting if self._may_have_last_step(m)]
                if not waiting and self._over:
                    self._end_stretch()
                elif not waiting:
                    self._state.wait()
                else:
                    member = min(waiting, key=lambda member: self._used[member])
                    if self.can_flow(member):
                        self._busy.add(member)
                        self._stepped.add(member)
                        fed = member.feeder.take()
                        self._captured += self._is_captured(member, fed)
                        return member, fed
                    self._over = True
        return None

    def _is_over(self, plan: FlowPlan | None) -> bool:
        ended = any(member.ended for member in self._members)
        deviated = plan is not None and plan.deviated
        self._over = self._over or deviated or ended or self._interrupted()
        return self._over

    def _may_have_last_step(self, member: JobRun) -> bool:
        """Whoever has not had a turn yet gets one: else others could starve him."""
        return member not in self._stepped and not member.stop_requested and self.can_flow(member)

    def _end_stretch(self) -> None:
        with self._state:
            self._ending = True
            self._state.notify_all()

    def _run_step(
        self, lane: int, plan: FlowPlan, member: JobRun, fed: FeedItem[PreparedBatch]
    ) -> None:
        assert fed.item is not None
        begun: list[_Begun | None] = []
        with self._python:
            self._guard(member, lambda: begun.append(self._begin(lane, plan, member, fed)))
        if begun and begun[0] is None:
            self._left.append((member, fed.item))
            self._end_stretch()
        elif begun and begun[0] is not None:
            step, flow_step, rates = begun[0]
            former = self._queued.get(member)
            result = self._lanes.run_step(lane, flow_step, plan.gate, former and former.result)
            self._settle(member, step, _Queued(result, rates, fed.item))
        with self._state:
            self._busy.discard(member)
            self._captured -= 1
            self._state.notify_all()

    def _run_eager_step(self, lane: int, member: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        """A step in the user's Python, which no other lane waits for."""
        ready = fed.item
        assert ready is not None
        done: list[tuple[float, tuple[float, ...]]] = []
        started = time.perf_counter()

        def step() -> None:
            member.enter_epoch(fed.epoch)
            rates = member.rates()
            loss = member.run_on_lane(ready, lambda size: self._make_room(member, size))
            done.append((loss, rates))

        def finish() -> None:
            member.step_queued()
            member.finish_step(*done[0])

        self._guard(member, step)
        span = (lane, 0, 0, started, time.perf_counter())
        with self._python:
            self._recorder.keep([span], [member])
            self._used[member] += (span[4] - span[3]) / member.job.weight
            if done:
                self._guard(member, finish)
            member.drop_gradients(self._residency)
            self._show(member)
        member.feeder.step_done()  # callbacks come before the next batch is fetched
        with self._state:
            self._over = self._over or not member.preparer.state_holds()
            self._busy.discard(member)
            self._state.notify_all()

    def _make_room(self, member: JobRun, size: int) -> bool:
        """Enlarges the room of an eager step that needs more than any before it.

        Captured steps keep their places by plan, so the memory between them is nobody's to take
        while one is under way: this ends the stretch and waits for those that are.
        """
        assert member.room is not None
        with PYTHON_TURNS.paused(), self._state:
            self._ending = True
            self._state.notify_all()
            self._state.wait_for(lambda: self._captured == 0)
            return member.room.grow(size)

    def _begin(
        self, lane: int, plan: FlowPlan, member: JobRun, fed: FeedItem[PreparedBatch]
    ) -> _Begun | None:
        assert fed.item is not None
        member.enter_epoch(fed.epoch)
        step = member.ready_step(fed.item)
        if step is None or not plan.has(step.compiled):
            return None
        member.load(step, fed.item)
        return step, plan.begin(step.compiled, lane, own_blocks=not self._check), member.rates()

    def _settle(self, member: JobRun, step: PreparedStep, queued: _Queued) -> None:
        (error,) = queued.result.errors
        self._conclude(member)
        with self._python:
            if error is not None:
                self._check_device()
                step.compiled.tape.clear(step.compiled.transient)
                member.fail(error)
                self._show(member)
            if error is not None:
                member.feeder.step_done()
                return
            member.send_ahead()
            self._guard(member, member.step_queued)
            self._queued[member] = queued
        if not self._lanes.device.queues or member.waits_for_loss:
            self._conclude(member)
        member.feeder.step_done()  # callbacks come before the next batch is fetched

    def _conclude(self, member: JobRun) -> None:
        """Waits for the job's step that is still under way, if there is one, and finishes it."""
        queued = self._queued.pop(member, None)
        if queued is None:
            return
        queued.result.wait()
        spans = queued.result.spans()
        with self._python:
            self._used[member] += sum(stop - start for *_, start, stop in spans) / member.job.weight
            self._recorder.keep(spans, [member])
            loss = queued.result.losses()[0]
            self._guard(member, lambda: member.finish_step(loss, queued.rates))
            self._show(member)


def _flow_jobs(steps: Sequence[tuple[JobRun, PreparedStep]]) -> list[FlowJob]:
    by_job: dict[JobRun, list[Piles]] = {}
    for member, step in steps:
        by_job.setdefault(member, []).append(step.piles)
    return [FlowJob(piles, member.job.weight) for member, piles in by_job.items()]
