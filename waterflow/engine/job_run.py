"""A job inside the engine: its life from submission to report."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from waterflow.account.purity import observer, undisturbed
from waterflow.capture.callbacks import may_fetch_ahead
from waterflow.capture.opaque import has_own_zero_grad
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.side_effects import PYTHON_TURNS
from waterflow.common.errors import NumbersDifferError
from waterflow.executor.data.feeder import Feeder, FeedItem
from waterflow.executor.plan.need import MemoryNeed
from waterflow.executor.plan.round_plan import solo_round
from waterflow.executor.run.eager_room import EagerRoom
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.executor.run.rng import JobRng
from waterflow.job.batch import moved
from waterflow.job.job import STOP, Job, StepResult
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.training_step import (
    check_finite,
    eager_step,
    learning_rates,
    step_scheduler,
    update_parameters,
)
from waterflow.report.job_report import JobReport
from waterflow.steps.audit import CheckSchedule, check_step
from waterflow.steps.step_cache import PreparedBatch, PreparedStep, Preparer, Specialization

Result = TypeVar("Result")


class JobRun:
    """A job in an engine. The engine's thread drives it; its feeder prepares its batches."""

    def __init__(
        self,
        number: int,
        job: Job,
        seed: int,
        lanes: Lanes,
        traces: OptimizerTraces,
        on_ready: Callable[[], None],
        audit: str = "log",
    ) -> None:
        self.number = number
        self.job = job
        self.device = lanes.device
        self.rng = JobRng(seed, self.device)
        self.report = JobReport(name=job.name, seed=seed)
        self.preparer = Preparer(job, self.device, self.rng, lanes.threads, traces=traces)
        self.admitted = False
        self.waiting = False
        self.stop_requested = False
        self.measured_extent = 0
        self.epoch = 0
        self.checks = CheckSchedule(job.audit or audit)
        self._begun = 0  # steps, those under way included
        self._unchecked = 0  # replays since the last check
        self._looked: tuple[PreparedBatch | None, int, bool] = (
            None,
            0,
            False,
        )  # see `_is_as_known`
        self.ran_in_arena = False  # whether an eager step has, since it was last measured
        self.room: EagerRoom | None = None  # where its eager steps run beside others
        self._bound: set[PreparedStep] = set()
        self._version = self.preparer.version  # of the persistent tensors that are entered
        self.feeder: Feeder[PreparedBatch] = Feeder(
            job.data,
            self.preparer,
            self._fetch,
            epochs=job.epochs,
            steps=job.steps,
            may_run_ahead=self._may_fetch_ahead,
            enter_epoch=self.enter_epoch,
            adopt_thread=lanes.adopt_helper,
            on_ready=on_ready,
            name=job.name,
        )

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def _may_fetch_ahead(self) -> bool:
        return self.preparer.draws_apart and self._data_is_apart

    @functools.cached_property
    def _data_is_apart(self) -> bool:
        return may_fetch_ahead(self.job, self.preparer.mutated())

    @property
    def ended(self) -> bool:
        """Whether the job will run no more."""
        return self.report.state not in ("queued", "running")

    @property
    def exclusive(self) -> bool:
        """Whether its steps run while no other job's do: part of them is eager Python."""
        opaque = self.preparer.opaque_step or self.preparer.opaque_optimizer
        return opaque is not None

    def runs_apart(self, ready: PreparedBatch) -> bool:
        """Whether this step runs while no other job's does: part of it is eager Python."""
        if ready.shape is None or self.exclusive:
            return True
        return self._is_to_check(ready.shape, self.preparer.step_for(ready.shape))

    def _is_to_check(self, shape: Specialization, step: PreparedStep | None) -> bool:
        """Whether this captured step is to be compared with the eager one."""
        if step is None or step not in shape.checked:
            return True
        return self.checks.is_due(self._begun + 1, step.memory.profile)

    def _is_as_known(self, ready: PreparedBatch) -> bool:
        """Whether all that the step reads is what it was, and the tensors are those entered. Looked
        at once a turn, however often it is asked: no Python of the job's runs between."""
        latest, begun, found = self._looked
        if latest is not ready or begun != self._begun:
            found = self.preparer.state_holds() and self.preparer.is_fresh(ready)
            self._looked = ready, self._begun, found
        return found and self._version == self.preparer.version

    @property
    def waits_for_loss(self) -> bool:
        """Whether something of the user's must know a step's loss before the next step begins."""
        job = self.job
        plateau = isinstance(job.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return job.on_step is not None or job.stop_on_nan or plateau

    def python(self, function: Callable[[], Result]) -> Result:
        """Runs Python of the job's: in its caller's context, with its random streams."""
        with PYTHON_TURNS.shared():
            return self.preparer.caller.run(self.rng, function)

    def _fetch(self, function: Callable[[], Result]) -> Result:
        """The same for its data, which may take its time, and may be fetched beside a step."""
        caller = self.preparer.caller
        return (caller.copy() if self._may_fetch_ahead() else caller).run(self.rng, function)

    # What it needs

    @property
    def need(self) -> MemoryNeed:
        """What it needs to take any step that it may still take, as far as is known."""
        final = self.preparer.final_persistent_bytes
        created = final - self.preparer.persistent_bytes
        steps = [(s.memory, created if s.creates_state else 0) for s in self._relevant_steps()]
        return MemoryNeed.of(final, steps, self.measured_extent)

    def _relevant_steps(self) -> list[PreparedStep]:
        """The steps that may still run: the first one is over once the state exists."""
        exists = self.preparer.state_exists
        return [step for step in self.preparer.steps() if not (exists and step.creates_state)]

    def note_solo_peak(self) -> None:
        """Reports the most that the job holds at once when it runs alone, as far as is known."""
        final, now = self.preparer.final_persistent_bytes, self.preparer.persistent_bytes
        peaks = [self.report.solo_peak_bytes or 0, final, final + self.measured_extent]
        for step in self._relevant_steps():
            base = now if step.creates_state else final
            peaks.append(base + step.memory.profile.transient_peak_bytes)
        self.report.solo_peak_bytes = max(peaks)
        self.note_capture()
        self.report.persistent_bytes = final

    def note_capture(self) -> None:
        """Reports how much of the job's step is captured, and why not all of it."""
        self.report.notes = list(self.preparer.notes)
        self.report.recaptures = self.preparer.recaptures
        if self.preparer.opaque_step is not None:
            self.report.captured = "opaque step"
        elif self.preparer.opaque_optimizer is not None:
            self.report.captured = "opaque optimizer"

    # Turns

    def next_turn(self) -> FeedItem[PreparedBatch] | None:
        """What the feeder has, None while it is still at work."""
        return self.feeder.peek()

    def refresh(self, ready: PreparedBatch, residency: Residency) -> PreparedBatch:
        """The batch ready for a step as the user's Python is now; captured anew where it must be.

        Raises:
            CaptureError: it cannot be, and the job insists on capture.
        """
        ready = self.preparer.refresh(ready)
        if self._version != self.preparer.version:
            self.settle(residency)
        return ready

    def choose_step(self, ready: PreparedBatch, residency: Residency) -> PreparedStep:
        """The step to run on this batch, made anew where hyperparameters have outgrown it."""
        assert ready.shape is not None
        step = self.preparer.step_for(ready.shape)
        if step is None:
            assert ready.flat is not None
            self.preparer.renew(ready.shape, ready.flat)
            step = self.preparer.step_for(ready.shape)
            assert step is not None, "a graph made for these hyperparameters is valid for them"
        if step not in self._bound:
            residency.move_in(self.number, step.graph.constants)
            self.preparer.bind(step)
            self._bound.add(step)
        return step

    def ready_step(self, ready: PreparedBatch) -> PreparedStep | None:
        """The step to run on this batch, where a lane is all that it needs: None where it is new,
        a first step, to be checked or eager, or where its batch needs a larger inbox."""
        if ready.shape is None or self.exclusive or not self._is_as_known(ready):
            return None
        prefetcher, step = self.preparer.prefetcher, self.preparer.step_for(ready.shape)
        if step is None or step.creates_state or step not in self._bound:
            return None
        if (
            ready.pinned is not None
            and prefetcher is not None
            and not prefetcher.fits(ready.pinned)
        ):
            return None
        return None if self._is_to_check(ready.shape, step) else step

    def runs_on_its_lane(self, ready: PreparedBatch) -> bool:
        """Whether this step is eager, or to be checked, and needs nothing but its lane for that."""
        if not self._is_as_known(ready):
            return False
        if ready.shape is None:
            return self.room is not None and self.room.is_open
        if self.exclusive or self.device.queues:
            return False
        step = self.preparer.step_for(ready.shape)
        if step is None or step.creates_state or step not in self._bound:
            return False
        return self._is_to_check(ready.shape, step)

    def may_run_on(self, lane: int) -> bool:
        """Whether its eager steps may run on this lane: all of them on one thread, as in the loop,
        since Python may keep things by thread."""
        return lane == 0 or self.preparer.opaque_step is None

    @property
    def eager_bytes(self) -> int | None:
        """Bytes that its eager steps have needed so far; None where they cannot run beside others,
        or not yet."""
        steady = self.measured_extent and self.preparer.state_holds()
        if self.preparer.opaque_step is None or self.device.queues or not steady:
            return None
        if (
            self.preparer.replaces_tensors
            or self.job.keep_grads
            or has_own_zero_grad(self.job.optimizer)
        ):
            return None  # what outlives a step needs a place of its own each time
        return self.measured_extent

    @property
    def bound(self) -> list[PreparedStep]:
        """The steps that have their tensors."""
        return list(self._bound)

    @property
    def bound_steps(self) -> int:
        """How many steps have their tensors."""
        return len(self._bound)

    def load(self, step: PreparedStep, ready: PreparedBatch) -> None:
        """Gives the tape its batch and the hyperparameters of this step."""
        assert ready.flat is not None
        assert ready.shape is not None
        self._begun += 1
        self._unchecked += 1
        ready.shape.turns += 1
        batch = ready.flat.tensors
        if ready.pinned is not None:
            assert self.preparer.prefetcher is not None
            self.preparer.prefetcher.send(ready.pinned)
            batch = self.preparer.prefetcher.receive(ready.pinned)
        step.compiled.tape.set_batch(batch)
        for register, value in self.preparer.registers(step).items():
            step.compiled.tape.set_register(register, value)

    def make_room(self, ready: PreparedBatch | None, lanes: Lanes, residency: Residency) -> bool:
        """Opens the job's inbox, or a larger one for this batch; returns whether it has moved.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        prefetcher = self.preparer.prefetcher
        pinned = None if ready is None else ready.pinned
        if (
            prefetcher is None
            or not prefetcher.size
            or (pinned is not None and prefetcher.fits(pinned))
        ):
            return False
        prefetcher.open(self.number, lanes.scope, residency)
        return True

    def send_ahead(self) -> None:
        """Queues the copy of the next batch to the device, if there is one and it has room."""
        fed, prefetcher = self.next_turn(), self.preparer.prefetcher
        if fed is None or fed.item is None or fed.item.pinned is None or prefetcher is None:
            return
        if prefetcher.fits(fed.item.pinned):
            prefetcher.send(fed.item.pinned)

    def run_exclusively(self, lanes: Lanes, residency: Residency, ready: PreparedBatch) -> float:
        """Runs a step that is partly or wholly eager; returns its loss.

        Gradients stay until `drop_gradients`.

        Raises:
            Whatever the step raises.
        """
        if ready.shape is None:
            return self._run_eagerly(lanes, ready)
        step = self.choose_step(ready, residency)
        if self._is_to_check(ready.shape, step):
            return self._run_checked(ready)
        self.make_room(ready, lanes, residency)
        self.load(step, ready)
        result = lanes.run(solo_round(self.number, step.compiled))
        (error,) = result.errors
        if error is not None:
            step.compiled.tape.clear(step.compiled.transient)
            raise error
        self._step_optimizer(lanes, step)
        result.wait()
        return float(result.losses()[0])

    def _run_eagerly(self, lanes: Lanes, ready: PreparedBatch) -> float:
        loss = self._step_eagerly(ready, lanes.scope(self.number))
        self.ran_in_arena = True
        return loss

    def run_on_lane(self, ready: PreparedBatch, more: Callable[[int], bool]) -> float:
        """Runs a step that needs only its lane (`runs_on_its_lane`), beside others'.

        Args:
            ready: its batch.
            more: see `EagerRoom.scope`.

        Raises:
            Whatever the step raises.
        """
        if ready.shape is not None:
            return self._run_checked(ready)
        assert self.room is not None
        loss = self._step_eagerly(ready, self.room.scope(more))
        if self.job.on_step is not None:
            grads = [p.grad for p in trained_parameters(self.job.optimizer) if p.grad is not None]
            self.room.move_out([*self.preparer.persistent.values(), *grads])
        return loss

    def _step_eagerly(self, ready: PreparedBatch, memory: AbstractContextManager[Any]) -> float:
        self._begun += 1
        self.report.eager_steps += 1

        before = self.preparer.begin_trial() if ready.trial else None
        seen = observer()
        observed = undisturbed(seen) if ready.trial else contextlib.nullcontext()

        def step() -> float:
            with memory, torch.autograd.set_multithreading_enabled(False), observed:
                return eager_step(self.job, moved(ready.batch, self.device.tensors))

        loss = self.python(step)
        if ready.trial:
            self.preparer.end_trial(ready, before, seen)
        return loss

    def _run_checked(self, ready: PreparedBatch) -> float:
        """Makes the step eagerly, and compares its captured form, which is bound, with it.

        Raises:
            NumbersDifferError: they differ, and captured steps have been made since the last check.
        """
        assert ready.shape is not None
        assert ready.flat is not None
        step = self.preparer.step_for(ready.shape)
        assert step is not None
        self._begun += 1
        ready.shape.turns += 1
        self.report.eager_steps += 1
        self._bound.discard(step)
        with self.checks.timed(self._begun):
            checked = check_step(
                self.preparer,
                ready.shape,
                step,
                ready.flat,
                ready.batch,
                self.python,
                compare=self.checks.compares,
            )
        self.report.checks += self.checks.compares
        if checked.difference is not None and self._unchecked and step in ready.shape.checked:
            raise NumbersDifferError(
                f"job {self.name!r}: at step {self._begun} its captured step gives another number "
                f"than the eager step: {checked.difference}. Up to {self._unchecked} steps before "
                "it, made by the captured step, may be wrong, too. Give the job capture=False, and "
                "report the model: this is a defect of waterflow."
            )
        self._unchecked = 0
        self.preparer.judge(ready.shape, step, checked)
        if self.preparer.state_holds() and step in ready.shape.checked:
            self.preparer.bind(step)
            self._bound.add(step)
        return checked.loss

    def _step_optimizer(self, lanes: Lanes, step: PreparedStep) -> None:
        """The optimizer's own step on the gradients that the tape has left."""
        parameters = trained_parameters(self.job.optimizer)
        tape = step.compiled.tape
        for parameter in parameters:
            parameter.grad = None
        for key, slot in step.compiled.outputs.items():
            parameters[key[1]].grad = tape.slot(slot)  # type: ignore[index]
        tape.clear(list(step.compiled.outputs.values()))

        def update() -> None:
            with lanes.scope(self.number):
                update_parameters(self.job.optimizer, self.job.clip_grad_norm)

        self.python(update)
        self.ran_in_arena = True

    def drop_gradients(self, residency: Residency) -> None:
        """Lets go of the gradients that the next step would drop at its beginning."""
        if has_own_zero_grad(self.job.optimizer) or self.job.keep_grads:
            return
        for parameter in trained_parameters(self.job.optimizer):
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                residency.drop(parameter.grad)  # else their place would stay taken between steps
        self.job.optimizer.zero_grad(set_to_none=True)

    def take_state(self, step: PreparedStep) -> None:
        """After a first step: what it made becomes the optimizer's state."""
        tape = step.compiled.tape
        made = {key: tape.slot(slot) for key, slot in step.compiled.outputs.items()}
        self.preparer.put_state(step, made)
        tape.clear(list(step.compiled.outputs.values()))
        self.state_changed()

    def state_changed(self) -> None:
        """The persistent tensors are others than before: steps must be bound to them."""
        for step in self._bound:
            step.compiled.unbind()
        self._bound.clear()
        self.preparer.note_persistent()
        self._version = self.preparer.version

    def step_queued(self) -> None:
        """A step is on its way, its loss not known yet: what the next one needs is done now.

        Raises:
            Whatever the scheduler raises.
        """
        if not self.waits_for_loss:
            self._step_scheduler("step", math.nan)

    def _step_scheduler(self, every: str, loss: float) -> None:
        if self.job.scheduler is not None and self.job.scheduler_every == every:
            # A captured step calls no step(), which schedulers would warn of.
            self.job.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.python(lambda: step_scheduler(self.job, every, loss))

    def finish_step(self, loss: float, rates: tuple[float, ...]) -> None:
        """After a step: records it, steps the scheduler, asks the callback.

        Raises:
            NonFiniteLossError: the job asked to stop on that.
            Whatever the callback or the scheduler raises.
        """
        report, job = self.report, self.job
        report.losses.append(loss)
        report.steps += 1
        check_finite(job, report.steps, loss)
        if self.waits_for_loss:
            self._step_scheduler("step", loss)
        if job.on_step is not None:
            result = StepResult(job.name, report.steps, self.epoch, loss, rates)
            on_step = job.on_step
            answer = self.python(lambda: on_step(result))
            if answer is STOP:
                self.end("stopped")
                return
        if job.steps is not None and report.steps >= job.steps:
            self.end("finished")

    def enter_epoch(self, epoch: int) -> None:
        """Steps a per-epoch scheduler for every epoch that lies behind."""
        while self.epoch < epoch:
            self.epoch += 1
            self.report.epochs = self.epoch
            losses = self.report.losses
            self._step_scheduler("epoch", losses[-1] if losses else math.nan)

    def rates(self) -> tuple[float, ...]:
        """The learning rates now."""
        return learning_rates(self.job)

    # Coming and going

    def start_clock(self) -> None:
        """The job's wall time begins."""
        self._started = time.perf_counter()
        self.report.state = "running"

    def end(self, state: Any, error: BaseException | None = None) -> None:
        """The job will run no more."""
        if self.ended:
            return
        self.report.state = state
        self.note_capture()
        if self.admitted:
            self.report.wall_seconds = time.perf_counter() - self._started
        if error is not None:
            self.report.exception = error
            self.report.error_type = type(error).__name__
            self.report.error = str(error) or type(error).__name__
        self.feeder.stop()

    def fail(self, error: BaseException) -> None:
        """The job ends with an error; its traceback keeps no tensors alive."""
        _let_go_of_frames(error)
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self.end("out_of_memory" if out_of_memory else "failed", error)

    def move_in(self, residency: Residency) -> None:
        """Gives the persistent tensors their places in the arena."""
        residency.move_in(self.number, self.preparer.all_persistent())

    def settle(self, residency: Residency) -> None:
        """After a step of eager Python: what it has made and kept, or replaced, is accounted for.

        Before user code looks: afterwards tensors that are kept in place have another address.

        Raises:
            torch.OutOfMemoryError: there is no room for them.
        """
        self.preparer.note_persistent()
        if self._version != self.preparer.version:
            self.state_changed()
        made = [tensor for tensor in self._made_by_step() if residency.counts(tensor)]
        residency.settle(self.number, [*self.preparer.all_persistent(), *made])

    def _made_by_step(self) -> Iterator[torch.Tensor]:
        """What else than parameters, buffers and plain state outlives a step."""
        yield from _tensors_in(dict(self.job.optimizer.state))
        yield from _tensors_in([parameter.grad for parameter in self.job.model.parameters()])
        if self.preparer.prefetcher is not None and self.preparer.prefetcher.block is not None:
            yield self.preparer.prefetcher.block

    def move_out(self, residency: Residency) -> None:
        """Gives up the job's places in the arena; its tensors are in ordinary memory again."""
        for step in self.preparer.steps():
            step.compiled.unbind()
        self._bound.clear()
        if not has_own_zero_grad(self.job.optimizer) and not self.job.keep_grads:
            for parameter in self.job.model.parameters():
                parameter.grad = None
        if self.room is not None:
            self.room.retire()
            self.room = None
        if self.preparer.prefetcher is not None:
            self.preparer.prefetcher.close(residency)
        residency.move_out(self.number, self._own_tensors(), self._known_tensors())

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        self.preparer.note_persistent()  # an eager step may have replaced some
        yield from self.preparer.all_persistent()
        yield from self._made_by_step()

    def _known_tensors(self) -> Iterator[torch.Tensor]:
        for module in self.job.model.modules():
            yield from _tensors_in(vars(module))


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clears the variables of the frames that an error and its causes refer to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and type(value).__name__ != "FakeTensor":
            yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
