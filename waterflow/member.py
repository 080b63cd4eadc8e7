"""A job inside the engine: its life from submission to report."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from waterflow.batch import moved
from waterflow.eager import check_finite, eager_step, learning_rates, update_parameters
from waterflow.executor.feeder import Fed, Feeder
from waterflow.executor.lanes import Lanes
from waterflow.executor.plan import solo_round
from waterflow.executor.residence import Residence
from waterflow.executor.rng import JobRng
from waterflow.job import STOP, Job, StepResult
from waterflow.jobreport import JobReport
from waterflow.optimizer_state import trained_parameters
from waterflow.optimizer_traces import OptimizerTraces
from waterflow.prepare import PreparedStep, Preparer, Ready


class Member:
    """A job in an engine. The engine's thread drives it; its feeder prepares its batches."""

    def __init__(
        self,
        number: int,
        job: Job,
        seed: int,
        lanes: Lanes,
        traces: OptimizerTraces,
        on_ready: Callable[[], None],
    ) -> None:
        self.number = number
        self.job = job
        self.device = lanes.device
        self.rng = JobRng(seed, self.device)
        self.report = JobReport(name=job.name, seed=seed)
        streams = self.rng.generators
        self.preparer = Preparer(job, self.device, streams, lanes.threads, traces=traces)
        self.admitted = False
        self.waiting = False
        self.stop_requested = False
        self.measured_extent = 0
        self.epoch = 0
        self._bound: set[PreparedStep] = set()
        self.feeder: Feeder[Ready] = Feeder(
            job.data,
            self.preparer,
            self.rng,
            epochs=job.epochs,
            steps=job.steps,
            may_run_ahead=lambda: not self.draws,
            adopt_thread=lanes.adopt_helper,
            on_ready=on_ready,
            name=job.name,
        )

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def draws(self) -> bool:
        """Whether the step itself draws random numbers, so that data must wait its turn."""
        return self.preparer.draws

    @property
    def ended(self) -> bool:
        """Whether the job will run no more."""
        return self.report.state not in ("queued", "running")

    @property
    def exclusive(self) -> bool:
        """Whether its steps run while no other job's do: part of them is eager Python."""
        return not self.job.capture or self.preparer.opaque_optimizer is not None

    @property
    def waits_for_loss(self) -> bool:
        """Whether something of the user's must know a step's loss before the next step begins."""
        return self.job.on_step is not None or self.job.stop_on_nan

    # What it needs

    @property
    def solo_extent(self) -> int:
        """Arena bytes that a step needs beyond the final persistent tensors."""
        extents = [self.measured_extent]
        final = self.preparer.final_persistent_bytes
        created = final - self.preparer.persistent_bytes
        for step in self._relevant_steps():
            extents.append(step.memory.extent - (created if step.creates_state else 0))
        return max(extents)

    def _relevant_steps(self) -> list[PreparedStep]:
        """The steps that may still run: the first one is over once the state exists."""
        exists = self.preparer.state_exists
        return [step for step in self.preparer.steps() if not (exists and step.creates_state)]

    @property
    def needed_bytes(self) -> int:
        """The smallest budget under which the job can run alone."""
        return self.preparer.final_persistent_bytes + self.solo_extent

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
        if not self.job.capture:
            self.report.captured = "opaque step"
        elif self.preparer.opaque_optimizer is not None:
            self.report.captured = "opaque optimizer"

    # Turns

    def next_turn(self) -> Fed[Ready] | None:
        """What the feeder has, None while it is still at work."""
        return self.feeder.peek()

    def choose_step(self, ready: Ready, residence: Residence) -> PreparedStep:
        """The step to run on this batch, made anew where hyperparameters have outgrown it."""
        ready = self.preparer.refresh(ready)
        assert ready.shape is not None
        step = self.preparer.step_for(ready.shape)
        if step is None:
            assert ready.flat is not None
            self.preparer.renew(ready.shape, ready.flat)
            step = self.preparer.step_for(ready.shape)
            assert step is not None, "a graph made for these hyperparameters is valid for them"
        if step not in self._bound:
            residence.enter(self.number, step.graph.constants)
            self.preparer.bind(step)
            self._bound.add(step)
        return step

    def ready_step(self, ready: Ready) -> PreparedStep | None:
        """The step to run on this batch, where a lane is all that it needs: None where it is new,
        a first step or eager, or where its batch needs a larger inbox."""
        mailbox = self.preparer.mailbox
        if ready.shape is None or not self.preparer.is_fresh(ready):
            return None
        if ready.parcel is not None and mailbox is not None and not mailbox.fits(ready.parcel):
            return None
        step = self.preparer.step_for(ready.shape)
        return None if step is None or step.creates_state or step not in self._bound else step

    @property
    def bound(self) -> list[PreparedStep]:
        """The steps that have their tensors."""
        return list(self._bound)

    @property
    def bound_steps(self) -> int:
        """How many steps have their tensors."""
        return len(self._bound)

    def load(self, step: PreparedStep, ready: Ready) -> None:
        """Gives the tape its batch and the hyperparameters of this step."""
        assert ready.flat is not None
        batch = ready.flat.tensors
        if ready.parcel is not None:
            assert self.preparer.mailbox is not None
            self.preparer.mailbox.send(ready.parcel)
            batch = self.preparer.mailbox.receive(ready.parcel)
        step.compiled.tape.set_batch(batch)
        for register, value in self.preparer.registers(step).items():
            step.compiled.tape.set_register(register, value)

    def make_room(self, ready: Ready | None, lanes: Lanes, residence: Residence) -> bool:
        """Opens the job's inbox, or a larger one for this batch; returns whether it has moved.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        mailbox = self.preparer.mailbox
        parcel = None if ready is None else ready.parcel
        if mailbox is None or not mailbox.size or (parcel is not None and mailbox.fits(parcel)):
            return False
        mailbox.open(self.number, lanes.scope, residence)
        return True

    def send_ahead(self) -> None:
        """Queues the copy of the next batch to the device, if there is one and it has room."""
        fed, mailbox = self.next_turn(), self.preparer.mailbox
        if fed is None or fed.item is None or fed.item.parcel is None or mailbox is None:
            return
        if mailbox.fits(fed.item.parcel):
            mailbox.send(fed.item.parcel)

    def run_exclusively(self, lanes: Lanes, residence: Residence, ready: Ready) -> float:
        """Runs a step that is partly or wholly eager; returns its loss.

        Raises:
            Whatever the step raises.
        """
        if ready.shape is None:
            return self._run_eagerly(lanes, ready)
        step = self.choose_step(ready, residence)
        self.make_room(ready, lanes, residence)
        self.load(step, ready)
        result = lanes.run(solo_round(self.number, step.compiled))
        (error,) = result.errors
        if error is not None:
            step.compiled.tape.clear(step.compiled.transient)
            raise error
        self._step_optimizer(lanes, step)
        result.wait()
        return float(result.losses()[0])

    def _run_eagerly(self, lanes: Lanes, ready: Ready) -> float:
        with contextlib.ExitStack() as stack:
            stack.enter_context(lanes.scope(self.number))
            stack.enter_context(self.rng.scope())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            try:
                return eager_step(self.job, moved(ready.batch, self.device.tensors))
            finally:
                self.job.optimizer.zero_grad(set_to_none=True)

    def _step_optimizer(self, lanes: Lanes, step: PreparedStep) -> None:
        """The optimizer's own step on the gradients that the tape has left."""
        parameters = trained_parameters(self.job.optimizer)
        tape = step.compiled.tape
        for key, slot in step.compiled.outputs.items():
            parameters[key[1]].grad = tape.slot(slot)  # type: ignore[index]
        tape.clear(list(step.compiled.outputs.values()))
        with lanes.scope(self.number), self.rng.scope():
            update_parameters(self.job)
            self.job.optimizer.zero_grad(set_to_none=True)

    def take_state(self, step: PreparedStep) -> None:
        """After a first step: what it made becomes the optimizer's state."""
        parameters = trained_parameters(self.job.optimizer)
        tape, state = step.compiled.tape, self.job.optimizer.state
        entries: dict[Any, Any] = {
            key: tape.slot(slot) for key, slot in step.compiled.outputs.items()
        }
        entries.update(step.graph.plain_state)
        layout = step.optimizer.state_after if step.optimizer is not None else []
        for index, keys in enumerate(layout):
            if keys:
                state[parameters[index]] = {key: entries[index, key] for key in keys}
        tape.clear(list(step.compiled.outputs.values()))
        self.state_changed()

    def state_grew(self) -> bool:
        """Whether the optimizer has made state tensors that are not accounted for."""
        known = {id(tensor) for tensor in self.preparer.persistent.values()}
        entries = self.job.optimizer.state.values()
        return any(id(tensor) not in known for tensor in _tensors_in(list(entries)))

    def state_changed(self) -> None:
        """The optimizer's state tensors are new: steps must be bound to them."""
        for step in self._bound:
            step.compiled.unbind()
        self._bound.clear()
        self.preparer.state_exists = True
        self.preparer.note_persistent()

    def step_queued(self) -> None:
        """A step is on its way, its loss not known yet: what the next one needs is done now.

        Raises:
            Whatever the scheduler raises.
        """
        if not self.waits_for_loss:
            self._step_scheduler("step")

    def _step_scheduler(self, every: str) -> None:
        if self.job.scheduler is not None and self.job.scheduler_every == every:
            # A captured step calls no step(), which schedulers would warn of.
            self.job.optimizer._opt_called = True  # type: ignore[attr-defined]
            with self.rng.scope():
                self.job.scheduler.step()

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
            self._step_scheduler("step")
        if job.on_step is not None:
            result = StepResult(job.name, report.steps, self.epoch, loss, rates)
            with self.rng.scope():
                answer = job.on_step(result)
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
            self._step_scheduler("epoch")

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

    def enter(self, residence: Residence) -> None:
        """Moves the persistent tensors into the arena."""
        residence.enter(self.number, self.preparer.all_persistent())

    def leave(self, residence: Residence) -> None:
        """Moves everything of the job back to ordinary memory."""
        for step in self.preparer.steps():
            step.compiled.unbind()
        self._bound.clear()
        for parameter in self.job.model.parameters():
            parameter.grad = None
        if self.preparer.mailbox is not None:
            self.preparer.mailbox.close(residence)
        residence.leave(self.number, self._held_tensors())

    def _held_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.preparer.all_persistent()
        yield from _tensors_in(self.job.optimizer.state_dict()["state"])
        yield from _tensors_in(dict(self.job.optimizer.state))
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
