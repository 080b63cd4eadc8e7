"""Runs rounds: one step of every job that is ready, planned together, concluded when it is done.

On a device the lanes only queue a step. A round is concluded (losses read, callbacks asked) while
the device already works on the next one, unless a callback must know the loss before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from waterflow.common.errors import BudgetError, DeviceLostError
from waterflow.engine.job_run import JobRun
from waterflow.engine.recorder import Recorder
from waterflow.engine.round_planner import RoundPlanner, Turn
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.steps.prepared import PreparedBatch, PreparedStep

Guard = Callable[[JobRun, Callable[[], Any]], bool]


@dataclass
class _Queued:
    """A round whose losses have not been read yet."""

    result: Any
    turns: Sequence[Turn]
    rates: Sequence[tuple[float, ...]]
    finishing: list[bool]  # per turn: whether its step was queued as a whole
    batches: Sequence[PreparedBatch]  # kept, as the device may still read them


class RoundExecutor:
    """Runs the rounds of one engine, on the engine's thread."""

    def __init__(
        self,
        lanes: Lanes,
        residency: Residency,
        planner: RoundPlanner,
        recorder: Recorder,
        *,
        check: bool,
        guard: Guard,
        show: Callable[[JobRun], None],
    ) -> None:
        """Args beyond the obvious.

        check: every block goes through the arena, whose log is judged later.
        guard: runs something of a user's; an error ends that job alone, and False is returned.
        show: tells the user of a job's progress.
        """
        self._lanes = lanes
        self._arena = lanes.arena
        self._residency = residency
        self._planner = planner
        self._recorder = recorder
        self._check = check
        self._guard = guard
        self._show = show
        self._queued: _Queued | None = None
        self._batches: list[PreparedBatch] = []
        self.seconds = 0.0  # that the last round took

    @property
    def pending(self) -> bool:
        """Whether a round waits to be concluded."""
        return self._queued is not None

    def run(self, turns: Sequence[tuple[JobRun, PreparedBatch]]) -> None:
        """Runs one step of each job.

        Raises:
            DeviceLostError: the device fails every call from now on.
        """
        started = time.perf_counter()
        self._batches = [ready for _, ready in turns]
        flowing: list[Turn] = []
        apart: list[tuple[JobRun, PreparedBatch]] = []
        for member, given in turns:
            ready = self._refreshed(member, given)
            if ready is None:
                continue
            if member.runs_apart(ready):
                apart.append((member, ready))
                continue
            step = self._chosen(member, ready)
            if step is None:
                continue
            if step.creates_state:
                self._run_first(member, step)
            else:
                flowing.append((member, step))
        if flowing:
            self._run_flowing(flowing)
        for member, ready in apart:
            self._run_apart(member, ready)
        if turns:
            self.seconds = time.perf_counter() - started

    def conclude(self) -> None:
        """Waits for the round that is still under way, if there is one, and finishes its steps."""
        queued, self._queued = self._queued, None
        if queued is None:
            return
        queued.result.wait()
        losses = queued.result.losses()
        self._recorder.keep(queued.result.spans(), [member for member, _ in queued.turns])
        for place, (member, _) in enumerate(queued.turns):
            if queued.finishing[place]:
                loss, rates = losses[place], queued.rates[place]
                self._guard(member, lambda m=member, n=loss, r=rates: m.finish_step(n, r))  # type: ignore[misc]
            self._show(member)

    def _refreshed(self, member: JobRun, ready: PreparedBatch) -> PreparedBatch | None:
        """The batch, ready for the user's Python as it is now; None where that ends the job."""
        found: list[PreparedBatch] = []
        self._guard(member, lambda: found.append(member.refresh(ready, self._residency)))
        return found[0] if found else None

    def _chosen(self, member: JobRun, ready: PreparedBatch) -> PreparedStep | None:
        chosen: list[PreparedStep] = []

        def choose() -> None:
            known = member.bound_steps
            chosen.append(member.choose_step(ready, self._residency))
            if member.make_room(ready, self._lanes, self._residency):
                self._planner.moved()
            if member.bound_steps != known:
                self._planner.moved()
            member.load(chosen[0], ready)

        return chosen[0] if self._guard(member, choose) else None

    def _run_first(self, member: JobRun, step: PreparedStep) -> None:
        """The step that creates the optimizer's state runs alone; then the state is put away."""
        rates = [member.rates()]
        try:
            result = self._execute([(member, step)])
        except BudgetError as misfit:
            self._fail(member, step, misfit)
            return
        if result.errors[0] is None:
            member.take_state(step)
            self._guard(member, lambda: member.move_in(self._residency))
        self._settle(result, [(member, step)], rates)
        self.conclude()
        self._residency.repack()
        self._planner.moved()

    def _run_flowing(self, turns: Sequence[Turn]) -> None:
        rates = [member.rates() for member, _ in turns]
        try:
            result = self._execute(turns)
        except BudgetError as misfit:
            self._run_one_by_one(turns, misfit)
            return
        for member, _ in turns:
            member.send_ahead()
        self._settle(result, turns, rates)

    def _run_one_by_one(self, turns: Sequence[Turn], error: BudgetError) -> None:
        if len(turns) > 1:
            for one in turns:
                self._run_flowing([one])
        else:
            self._fail(*turns[0], error)

    def _execute(self, turns: Sequence[Turn]) -> Any:
        """Runs or queues a planned round."""
        plan = self._planner.plan(turns)
        creates = any(step.creates_state for _, step in turns)
        plan.begin(self._arena, own_blocks=not (creates or self._check))
        return self._lanes.run(plan.round)

    def _settle(
        self, result: Any, turns: Sequence[Turn], rates: Sequence[tuple[float, ...]]
    ) -> None:
        """Ends the jobs that failed; concludes the former round, and this one if it must be."""
        errors = result.errors
        if any(error is not None for error in errors):
            self.check_device()
        for (member, step), error in zip(turns, errors, strict=True):
            if error is not None:
                self._fail(member, step, error)
        self.conclude()
        finishing = [error is None for error in errors]
        for (member, _), fine in zip(turns, finishing, strict=True):
            if fine:
                self._guard(member, member.step_queued)
        self._queued = _Queued(result, turns, rates, finishing, self._batches)
        if not self._lanes.device.queues or any(m.waits_for_loss for m, _ in turns):
            self.conclude()
        for (member, _), fine in zip(turns, finishing, strict=True):
            if fine:  # callbacks come before the next batch is fetched
                member.feeder.step_done()

    def _fail(self, member: JobRun, step: PreparedStep, error: BaseException) -> None:
        step.compiled.tape.clear(step.compiled.transient)
        self._arena.synchronize()
        self._planner.moved()
        member.fail(error)
        member.feeder.step_done()
        self._show(member)

    def _run_apart(self, member: JobRun, ready: PreparedBatch) -> None:
        self.conclude()
        rates = member.rates()
        self._planner.moved()
        started = time.perf_counter()

        def step() -> None:
            loss = member.run_exclusively(self._lanes, self._residency, ready)
            member.settle(self._residency)
            member.step_queued()
            member.finish_step(loss, rates)

        fine = self._guard(member, step)
        member.drop_gradients(self._residency)
        self._recorder.keep([(0, 0, 0, started, time.perf_counter())], [member])
        if not fine:
            self.check_device()
        self._arena.synchronize()
        if fine:
            self._after_exclusive(member)
        member.feeder.step_done()
        self._show(member)

    def _after_exclusive(self, member: JobRun) -> None:
        """Notes what an eager step took, and closes the gaps that it left."""
        if member.ran_in_arena:
            held = int(self._arena.held(member.number))
            taken = int(self._arena.peak(member.number)) - held
            member.measured_extent = max(member.measured_extent, taken)
            member.ran_in_arena = False
        self._residency.repack()
        self._planner.moved()
        member.note_solo_peak()

    def check_device(self) -> None:
        """Returns while the device works.

        Raises:
            DeviceLostError: every call on it fails from now on.
        """
        failure = self._lanes.device.failure()
        if failure:
            raise DeviceLostError(
                f"{self._lanes.device.name} is lost: {failure}. A kernel of one of the jobs that "
                "ran has broken the CUDA context, and nothing on the device can be read any more; "
                "losses and times so far are in the report. Restart the process; to find the "
                "kernel, run the jobs one at a time with CUDA_LAUNCH_BLOCKING=1"
            )
