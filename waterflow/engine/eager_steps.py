"""A job's steps in the user's own Python: opaque ones, and those that check captured ones."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from waterflow.account.purity import observer, undisturbed
from waterflow.capture.callbacks import data_use_gradients
from waterflow.capture.casts import Casts, casts_of
from waterflow.capture.torchs_calls import has_own_zero_grad
from waterflow.common.errors import JobError, NumbersDifferError
from waterflow.engine.captured_steps import CapturedSteps
from waterflow.engine.data_memory import DataMemory
from waterflow.engine.events import EagerStepBegun, EventStream, StepChecked
from waterflow.engine.job_needs import JobNeeds
from waterflow.executor.plan.round_plan import solo_round
from waterflow.executor.run.eager_room import EagerRoom
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.job.batch import moved
from waterflow.job.gradients import held_gradients
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.training_step import eager_step, update_parameters
from waterflow.steps.audit import check_step
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedBatch, PreparedStep, losses_of
from waterflow.steps.side_by_side import SideBySide

#: A train that makes fewer tensors does not show how long its operators are. Nor does the first
#: step, in which much is made that later ones find, unless it takes so many seconds, and so many
#: for each tensor.
_LEAST_TENSORS = 200
_LONG_STEP, _LONG_OPERATOR = 0.01, 1e-4


def on_one_thread() -> AbstractContextManager[Any]:
    """Inside, backward passes stay on the calling thread, whose tensors have a place of theirs."""
    return torch.autograd.set_multithreading_enabled(False)


def _zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Its ``zero_grad``; torch's own without what that tells the profiler and the compiler, which
    takes as long as a small operator does."""
    if has_own_zero_grad(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class EagerSteps:
    """Runs the eager steps of one job.

    Attributes:
        room: memory where they run beside other jobs' steps, None before there is any.
        room_on_demand: whether it can be had when a step begins, since no plan needs the memory.
    """

    def __init__(
        self,
        number: int,
        steps: JobSteps,
        captured: CapturedSteps,
        needs: JobNeeds,
        python: Callable[[Callable[[], Any]], Any],
        events: EventStream,
        data: DataMemory,
        side_by_side: SideBySide,
    ) -> None:
        """Args beyond the obvious.

        python: runs Python of the job's, in its caller's context and with its random streams.
        data: where its batches may lie.
        side_by_side: what all jobs have learnt of eager steps beside each other.
        """
        self._data = data
        self._side_by_side = side_by_side
        self._number = number
        self._job = steps.job
        self._steps = steps
        self._device = steps.device
        self._captured = captured
        self._needs = needs
        self._python = python
        self._events = events
        self._name = steps.job.name  # by which it is known, whatever a callback calls it
        self._ran_in_arena = False  # since what one needs was last measured
        self._peak_before = 0  # the job's in the arena, before that
        self.room: EagerRoom | None = None
        self.room_on_demand = False
        # Where persistent tensors lie, all of them known to be outside the room.
        self._outside: list[int] | None = None
        self._casts: Casts | None = None  # not looked at before it matters
        self._grain = math.inf  # seconds of a thread for each tensor that steps have made
        self._alone = math.inf  # of the wall's, while no other job was in eager steps

    # Where they may run

    @property
    def room_bytes(self) -> int | None:
        """Bytes that they have needed so far; None where they cannot run beside others, or not
        yet."""
        extent = self._needs.measured_extent or self._guess
        if self._device.queues or self._is_captured_in_part:
            return None
        if not extent or not self._steps.persistent.state_holds():
            return None
        if self._steps.persistent.were_replaced or not self._leaves_nothing:
            return None  # what outlives a step needs a place of its own each time
        return extent

    @property
    def _is_captured_in_part(self) -> bool:
        """Whether only the optimizer is eager Python, behind a captured pass, and needs no room."""
        steps = self._steps
        return steps.opacity.optimizer is not None and not steps.cache.is_empty

    @property
    def _guess(self) -> int:
        """What the first of them may need, where a plan for captured ones is not in its way."""
        tiers = self._steps.tiers
        if tiers is None or tiers.guess is None or not self.room_on_demand:
            return 0
        return tiers.guess.alone_bytes  # what it makes and keeps included

    def note_extent(self) -> bool:
        """Notes what steps in the room have taken; returns whether that is more than was known."""
        assert self.room is not None
        before, self._needs.measured_extent = (
            self._needs.measured_extent,
            max(self._needs.measured_extent, self.room.peak),
        )
        return self._needs.measured_extent > before

    def leave_room(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are to outlive the room's block get ordinary memory."""
        assert self.room is not None
        self.room.move_out(tensors)

    def note_kept(self, size: int) -> None:
        """The job holds so many bytes more than before the latest steps in the room."""
        assert self.room is not None
        if size > 0:
            self.room.note_kept(size)

    @property
    def is_as_found(self) -> bool:
        """Whether the job holds between steps what it held when its room was opened."""
        persistent = self._steps.persistent
        try:
            as_known = persistent.state_holds() and persistent.gradients_hold
            return as_known and not self._captured.tensors_have_changed
        except Exception:  # whoever accounts for what has changed meets it again
            return False

    @property
    def is_fine(self) -> bool:
        """Whether its operators are so short, or may be, that two such jobs side by side would wait
        for the interpreter's lock more than they would gain."""
        return not self._side_by_side.fine_seconds < self._grain < math.inf

    @property
    def is_measured(self) -> bool:
        """Whether it is known how long its operators are."""
        return self._grain < math.inf

    @property
    def knows_others(self) -> bool:
        """Whether it is known how such steps fare beside another job's."""
        return self._side_by_side.is_known(self._grain)

    @property
    def casts(self) -> Casts:
        """What its Python may do with autocast, and other things that all threads share."""
        if self._casts is None or self._job.autocast is not None:
            self._casts = casts_of(self._job)
        return self._casts

    @contextlib.contextmanager
    def timed(self, beside: Callable[[], int]) -> Iterator[None]:
        """Around a train of steps in the room, on its thread.

        Args:
            beside: how many jobs are in eager steps now, this one included.
        """
        assert self.room is not None
        jobs, made, begun = beside(), self.room.allocations, self._captured.begun
        started, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            made = self.room.allocations - made
            seconds, wall = time.thread_time() - started, time.perf_counter() - wall
            # Waiting for the lock takes processor time, too: the least is the truest.
            is_long = seconds >= max(_LONG_STEP, _LONG_OPERATOR * made)
            enough = made > _LEAST_TENSORS and self._captured.begun - max(begun, 1) >= 1
            if made and (enough or is_long):
                self._grain = min(self._grain, seconds / made)
                if jobs == beside():
                    self._note_wall(jobs, wall / made)

    def _note_wall(self, jobs: int, seconds: float) -> None:
        """A train beside so many jobs has taken so much time for each tensor that it has made."""
        if jobs == 1:
            self._alone = min(self._alone, seconds)
        elif self._alone < math.inf:
            self._side_by_side.note(self._grain, seconds / (self._alone * jobs))

    def needs_lane_only(self, batch: PreparedBatch) -> bool:
        """Whether this step is eager, or to be checked, and needs nothing but its lane for that."""
        if batch.specialization is not None:
            return not self._device.queues and self._captured.is_ready_to_check(batch)
        return self.has_room and self._captured.is_as_known(batch)

    @property
    def has_room(self) -> bool:
        """Whether there is room for them beside others, or would be for a step that begins."""
        if self.room is not None and self.room.is_open:
            return True
        return self.room_on_demand and self.room_bytes is not None

    def open_room(self, lanes: Lanes, left: int) -> bool:
        """Sets memory aside for them, if they can use it and `left` bytes remain for others;
        returns whether there is some."""
        need = self.room_bytes
        if need is None:
            return False
        if self.room is None:
            self.room = EagerRoom(lanes, self._number)
            self._outside = None
        self._keep_to_limit(lanes)
        return self.room.is_open or self.room.open(need, left)

    def close_room(self) -> None:
        """Gives that memory back, if there is any."""
        if self.room is not None and self.room.is_open:
            self.room.close()

    def retire_room(self) -> None:
        """The job leaves."""
        if self.room is not None:
            self.room.retire()
            self.room = None

    # How they run

    def run_apart(
        self,
        lanes: Lanes,
        residency: Residency,
        batch: PreparedBatch,
        more: Callable[[int], bool] | None = None,
    ) -> float:
        """Runs a step that is partly or wholly eager while no other job's does; returns its loss.

        Gradients stay until `drop_gradients`.

        Args:
            lanes: the engine's.
            residency: where the job has its places.
            batch: its batch.
            more: see `Lanes.scope`.

        Raises:
            Whatever the step raises.
        """
        self._keep_to_limit(lanes)
        if not self._ran_in_arena:
            self._peak_before = int(lanes.arena.peak(self._number))
        if batch.specialization is None:
            loss = self._step(batch, lanes.scope(self._number, more))
            self._ran_in_arena = True
            return loss
        step = self._captured.choose(batch, residency)
        if self._captured.is_to_check(batch.specialization, step):
            return self._check(batch)
        self._captured.open_input(batch, lanes, residency)
        self._captured.load(step, batch)
        result = lanes.run(solo_round(self._number, step.compiled))
        (error,) = result.errors
        if error is not None:
            step.compiled.tape.clear(step.compiled.transient)
            raise error
        self._step_optimizer(lanes, step, more)
        result.wait()
        return losses_of([step], result)[0]

    def run_on_lane(self, batch: PreparedBatch, more: Callable[[int], bool]) -> float:
        """Runs a step that needs only its lane (`needs_lane_only`), beside others'.

        Args:
            batch: its batch.
            more: see `EagerRoom.scope`.

        Raises:
            Whatever the step raises.
        """
        if batch.specialization is not None:
            return self._check(batch)
        assert self.room is not None
        loss = self._step(batch, self.room.scope(more))
        self._move_out_of_room()
        return loss

    def make(self, batch: PreparedBatch, memory: AbstractContextManager[Any]) -> float:
        """Makes a step of a train in the job's room; returns its loss.

        Args:
            batch: its batch.
            memory: inside, the thread's tensors come from the room.

        Raises:
            Whatever the step raises.
        """
        self._begin()
        loss = self._make(batch, memory)
        self._move_out_of_room()
        return loss

    def _move_out_of_room(self) -> None:
        """What callbacks may keep views of gets ordinary memory."""
        if self._job.on_step is None or self.room is None:
            return
        if not self._steps.persistent.state_holds():
            self._steps.cache.collect_persistent()
        parameters = trained_parameters(self._job.optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        kept = list(self._steps.persistent.tensors.values())
        # To move one gives up the interpreter's lock. An address that was outside is so still; an
        # empty tensor has none.
        if self._outside != [tensor.data_ptr() for tensor in kept]:
            self.room.move_out(kept)
            places = [tensor.data_ptr() for tensor in kept]
            self._outside = None if 0 in places else places
        self.room.move_out(grads)

    def _begin(self) -> None:
        self._captured.begin()
        self._events.publish(EagerStepBegun(self._name))

    @property
    def _breaks_limit(self) -> bool:
        """Whether a step that has to be spilled to keep to a limit would run as eager Python. Not
        where its batch was ready before there was one: then those that follow are captured."""
        steps = self._steps
        is_needed = steps.spiller.is_needed and not steps.spiller.is_lent
        return is_needed and (steps.opacity.reason is not None or steps.tiers is None)

    def over_limit(self, limit: int | None, need: int | None = None) -> JobError:
        """What to raise where a job has to run eager steps that need more than its limit, or so
        many bytes."""
        reason = self._steps.opacity.reason or "a batch could not be captured"
        needs = "" if need is None else f" and has needed {need} bytes"
        return JobError(
            f"job {self._job.name!r}: memory_limit={limit} cannot be kept, since its step runs as "
            f"eager Python, which cannot be spilled{needs}: {reason}. Change that, or give it more "
            "memory"
        )

    @property
    def _hard_limit(self) -> int | None:
        """Bytes that its eager steps may not go beyond, since no plan keeps them from it."""
        spiller, is_opaque = self._steps.spiller, self._steps.opacity.reason is not None
        return spiller.limit if is_opaque and not spiller.is_lent else None

    def _keep_to_limit(self, lanes: Lanes) -> None:
        """From here on the arena refuses the job what is beyond its limit. All but the steps of an
        opaque job keep to theirs by their plan."""
        lanes.arena.set_limit(self._number, self._hard_limit)

    def _step(self, batch: PreparedBatch, memory: AbstractContextManager[Any]) -> float:
        spiller = self._steps.spiller
        unsettled = self._job.step is not None and self._steps.opacity.step is None
        if spiller.limit is not None and (batch.trial or unsettled or spiller.is_lent):
            memory = contextlib.nullcontext()  # beside the budget, as checks
        elif self._breaks_limit:
            raise self.over_limit(spiller.limit)
        self._begin()
        make = functools.partial(self._make_apart, batch, memory)
        if not batch.trial:
            return self._python(make)  # type: ignore[no-any-return]
        before, seen = self._steps.trials.begin(), observer()
        loss: float = self._python(functools.partial(make, undisturbed(seen)))
        self._steps.trials.end(batch, before, seen)
        return loss

    def _make_apart(
        self,
        batch: PreparedBatch,
        memory: AbstractContextManager[Any],
        observed: AbstractContextManager[Any] | None = None,
    ) -> float:
        """A step that is no part of a train."""
        with self._steps.persistent.gradients_lent(), on_one_thread():
            return self._make(batch, memory, observed)

    def _make(
        self,
        batch: PreparedBatch,
        memory: AbstractContextManager[Any],
        observed: AbstractContextManager[Any] | None = None,
    ) -> float:
        """The step itself, on the job's thread and in its context, `on_one_thread`, and with its
        gradients lent."""
        room, tiers = self.room, self._steps.tiers
        signature = None if batch.flat is None else batch.flat.signature
        measures = tiers is not None and signature is not None and tiers.measures(signature)
        if measures:
            started, made = time.thread_time(), 0 if room is None else room.allocations
        with memory:
            given = self._data.lend(batch.batch)
            if observed is None:
                loss = eager_step(self._job, self._on_device(given), zero_grad=_zero_grad)
            else:
                with observed:
                    loss = eager_step(self._job, self._on_device(given))
            self._data.take_back(given, batch.batch)
        self._steps.opacity.prove()
        if tiers is not None and signature is not None:
            seconds = time.thread_time() - started if measures else None
            tensors = room.allocations - made if measures and room is not None else None
            tiers.note_step(signature, seconds, tensors or None)
        return loss

    def _on_device(self, batch: Any) -> Any:
        if not self._device.queues:
            return batch
        return moved(batch, self._device.tensors, self._job.batch_reads)

    def _check(self, batch: PreparedBatch) -> float:
        """Makes the step eagerly, and compares its captured form, which is bound, with it.

        Raises:
            NumbersDifferError: they differ, and captured steps have been made since the last check.
        """
        captured, specialization = self._captured, batch.specialization
        assert specialization is not None
        assert batch.flat is not None
        step = self._steps.cache.step_for(specialization)
        assert step is not None
        captured.begin()
        specialization.runs += 1
        self._events.publish(EagerStepBegun(self._name))
        captured.forget(step)
        with captured.checks.timed(captured.begun):
            checked = check_step(
                self._steps,
                specialization,
                step,
                batch.flat,
                batch.batch,
                self._python,
                compare=captured.checks.compares,
            )
        if captured.checks.compares:
            self._events.publish(StepChecked(self._name))
        differs = checked.difference is not None
        if differs and not self._steps.cache.is_fresh(batch):
            return checked.loss  # something was changed while they ran: it is captured anew
        was_right = step in specialization.checked and not checked.varies
        if differs and captured.unchecked and was_right:
            raise NumbersDifferError(
                f"job {self._job.name!r}: at step {captured.begun} its captured step gives another "
                f"number than the eager step: {checked.difference}. Up to {captured.unchecked} "
                "steps before it, made by the captured step, may be wrong, too. Give the job "
                "capture=False, and report the model: this is a defect of waterflow."
            )
        captured.unchecked = 0
        self._steps.cache.judge(specialization, step, checked)
        if self._steps.persistent.state_holds() and step in specialization.checked:
            captured.bind(step)
        return checked.loss

    def _step_optimizer(
        self, lanes: Lanes, step: PreparedStep, more: Callable[[int], bool] | None
    ) -> None:
        """The optimizer's own step on the gradients that the tape has left."""
        self._captured.take_gradients(step)

        memory = lanes.scope(self._number, more)
        self._python(functools.partial(self._update, memory))
        self._steps.opacity.prove()
        self._ran_in_arena = True

    def _update(self, memory: AbstractContextManager[Any]) -> None:
        with memory:
            update_parameters(self._job, self._job.optimizer)

    # What they leave

    @property
    def _leaves_nothing(self) -> bool:
        """Whether the gradients that a step leaves go, or have places of their own."""
        if self._job.step is None or self._job.keep_grads:
            return self._drops_gradients
        return self._steps.persistent.gradients_hold

    @property
    def _drops_gradients(self) -> bool:
        """Whether the next step would drop the gradients at its beginning, as torch's do."""
        job = self._job
        keeps = job.keep_grads or job.step or has_own_zero_grad(job.optimizer)
        return not (keeps or self._data_use_gradients)

    @functools.cached_property
    def _data_use_gradients(self) -> bool:
        """Whether the data, which are asked for a batch between two steps, may look at those."""
        try:
            return data_use_gradients(self._job)
        except Exception:  # objects may refuse to be looked at
            return False

    def drop_gradients(self, residency: Residency) -> None:
        """Lets go of the gradients that the next step would drop at its beginning."""
        if not self._drops_gradients:
            return
        parameters = trained_parameters(self._job.optimizer)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                residency.drop(parameter.grad)  # else their place would stay taken between steps
        with held_gradients(parameters):
            self._job.optimizer.zero_grad(set_to_none=True)

    def forget_gradients(self) -> None:
        """The same for all parameters of a job that leaves; its feeder may be at a capture yet."""
        if self._drops_gradients:
            parameters = list(self._job.root.parameters())
            with held_gradients(parameters):
                for parameter in parameters:
                    parameter.grad = None

    def measure(self, arena: Any) -> None:
        """Notes what the latest step has taken of the arena, if it ran there and more than any
        before: a peak that is older may be that of a room, which is larger than what it is for."""
        if self._ran_in_arena:
            peak = int(arena.peak(self._number))
            taken = 1  # what takes nothing is known, too
            if peak > self._peak_before:
                taken = max(taken, peak - int(arena.held(self._number)))
            self._needs.measured_extent = max(self._needs.measured_extent, taken)
            self._ran_in_arena = False
