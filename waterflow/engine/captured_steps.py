"""A job's captured steps on the lanes: which one a batch needs, and that it has all it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from waterflow.common.errors import JobError
from waterflow.engine.user_loop import Between
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.job.optimizer_state import trained_parameters, watch_hyperparameters
from waterflow.steps.check_schedule import CheckSchedule
from waterflow.steps.foretold import WRITTEN, Foreteller, Foretold
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedBatch, PreparedStep, Specialization

#: Where the user's Python has changed something between two steps, it is looked at closely before
#: each of so many.
_WARY_STEPS = 64


@dataclass(frozen=True, eq=False)
class Watched:
    """A step that a lane may make again and again.

    Attributes:
        step: the step.
        specialization: its own.
        look: the extension's look at all that it takes for granted; None where one step at a time
            is to be made, each as `is_as_known` has found it.
        registers: its hyperparameters, as they were looked at.
        parts: what the look was made of.
        between: what comes after each step.
    """

    step: PreparedStep
    specialization: Specialization
    look: Any
    registers: dict[int, float]
    parts: tuple[Any, ...]
    between: Between


class CapturedSteps:
    """The captured steps of one job, bound to its tensors.

    Attributes:
        begun: steps of the job begun so far, eager ones included.
        unchecked: captured steps since one was last compared with the eager step.
        checks: when the next one is due.
        step_seconds: what a step of the latest train took; 0.0 before there was one.
    """

    def __init__(self, number: int, steps: JobSteps, checks: CheckSchedule) -> None:
        self._number = number
        self._steps = steps
        self.checks = checks
        self.begun = 0
        self.unchecked = 0
        self.step_seconds = 0.0
        self._watched: Watched | None = None
        self._foreteller = Foreteller(steps.job)
        self._distrusts_looks = False
        self._wary_until = 0  # steps begun
        self._bound: set[PreparedStep] = set()
        self._version = (
            steps.persistent.version
        )  # of the persistent tensors that the steps are bound to
        # The batch last looked at, the steps begun by then, and what was found: see `_is_as_known`.
        self._looked: tuple[PreparedBatch | None, int, bool] = (None, 0, False)
        # The same for the step: see `is_ready_to_check`.
        self._found: tuple[PreparedBatch | None, int, PreparedStep | None] = (None, 0, None)

    # Which step

    @property
    def exclusive(self) -> bool:
        """Whether the job's steps run while no other job's do: part of them is eager Python."""
        opaque = self._steps.opacity.step or self._steps.opacity.optimizer
        return opaque is not None

    def runs_apart(self, batch: PreparedBatch) -> bool:
        """Whether this step runs while no other job's does: part of it is eager Python."""
        if batch.specialization is None or self.exclusive:
            return True
        return self.is_to_check(
            batch.specialization, self._steps.cache.step_for(batch.specialization)
        )

    def is_to_check(self, specialization: Specialization, step: PreparedStep | None) -> bool:
        """Whether this captured step is to be compared with the eager one."""
        if step is None or step not in specialization.checked:
            return True
        if step.creates_state and self._steps.spiller.limit is not None:
            return True  # its memory is not planned: the eager step takes ordinary memory
        return self.checks.is_due(self.begun + 1, self.seconds_of(step))

    def seconds_of(self, step: PreparedStep | None) -> float:
        """What a step takes: as it was seen to, or as its profile says, which ran it cold; 0.0
        where nothing is known of it."""
        if self.step_seconds or step is None:
            return self.step_seconds
        return float(step.memory.profile.seconds)

    def is_as_known(self, batch: PreparedBatch) -> bool:
        """Whether all that the step reads is what it was, and the tensors are those entered. Looked
        at once a step, however often it is asked: no Python of the job's runs between."""
        latest, begun, found = self._looked
        if latest is not batch or begun != self.begun:
            found = self._steps.persistent.state_holds() and self._steps.cache.is_fresh(batch)
            found = found and self._steps.caller.opaque is None
            self._looked = batch, self.begun, found
        if batch.specialization is None:
            return found and not self.tensors_have_changed
        return found and self._is_collected_for(batch.specialization)

    def ready_step(self, batch: PreparedBatch) -> PreparedStep | None:
        """The step to run on this batch, where a lane is all that it needs: None where it is new,
        a first step, to be checked or eager, or where its batch needs a larger device input."""
        if batch.specialization is None or self.exclusive or not self.is_as_known(batch):
            return None
        step = self._with_tensors(self._steps.cache.step_for(batch.specialization))
        if step is None or not self._has_room(batch):
            return None
        return None if self.is_to_check(batch.specialization, step) else step

    def is_ready_to_check(self, batch: PreparedBatch) -> bool:
        """Whether this step is to be compared with the eager one, and nothing else is missing.

        Asked by all who choose among jobs: which step it is, which takes a look at all
        hyperparameters, is looked up once where it is not to be checked. Whoever makes it looks.
        """
        if batch.specialization is None or self.exclusive or not self.is_as_known(batch):
            return False
        latest, begun, step = self._found
        is_known = latest is batch and begun == self.begun
        if is_known and not self.is_to_check(batch.specialization, step):
            return False
        step = self._steps.cache.step_for(batch.specialization)
        self._found = batch, self.begun, step
        step = self._with_tensors(step)
        return step is not None and self.is_to_check(batch.specialization, step)

    def _with_tensors(self, step: PreparedStep | None) -> PreparedStep | None:
        return None if step is None or step.creates_state or step not in self._bound else step

    def lacks_tensors(self, specialization: Specialization) -> bool:
        """Whether its step has not got the job's tensors, or not those that they are now."""
        is_bound = specialization.steady in self._bound
        return not (is_bound and self._is_collected_for(specialization))

    def _is_collected_for(self, specialization: Specialization) -> bool:
        """Whether the tensors that the steps are bound to are those that this one knows by their
        names: two may have changed places for a while, in which another was captured."""
        version = self._steps.persistent.version
        return self._version == version == specialization.collected

    @property
    def tensors_have_changed(self) -> bool:
        """Whether the persistent tensors are others than those that the steps are bound to."""
        return self._version != self._steps.persistent.version

    # What it needs

    @property
    def bound(self) -> list[PreparedStep]:
        """The steps that have their tensors."""
        return list(self._bound)

    @property
    def steady(self) -> list[PreparedStep]:
        """Those of them that make no state and leave nothing behind: what a plan can hold. None
        where the optimizer runs as Python, on gradients that outlive its graphs."""
        if self.exclusive:
            return []
        return [step for step in self._bound if not step.creates_state]

    def choose(self, batch: PreparedBatch, residency: Residency) -> PreparedStep:
        """The step to run on this batch, made anew where hyperparameters have outgrown it.

        Raises:
            JobError: it writes to what another job has, too: of eager steps, which may have been
                let in beside each other, that was not known.
        """
        assert batch.specialization is not None
        step = self._steps.cache.step_for(batch.specialization)
        if step is None:
            assert batch.flat is not None
            self._steps.cache.renew(batch.specialization, batch.flat)
            step = self._steps.cache.step_for(batch.specialization)
            assert step is not None, "a graph made for these hyperparameters is valid for them"
        if step not in self._bound:
            residency.move_in(self._number, step.graph.constants)
            self._check_sharing(step, residency)
            self.bind(step)
        return step

    def _check_sharing(self, step: PreparedStep, residency: Residency) -> None:
        inputs = self._steps.persistent.inputs_of(step)
        for tensor in (inputs[meaning] for meaning in step.graph.mutated if meaning in inputs):
            if residency.users(tensor) - {self._number}:
                raise JobError(
                    f"job {self._steps.job.name!r} shares a tensor of shape {tuple(tensor.shape)} "
                    "with another job that is under way, and its step changes it: give each its "
                    "own copy (copy.deepcopy)"
                )

    def bind(self, step: PreparedStep) -> None:
        """Gives the step the job's tensors and random streams."""
        self._steps.binder.bind(step)
        self._bound.add(step)

    def forget(self, step: PreparedStep) -> None:
        """The step's tape is bound to other tensors for a while."""
        self._bound.discard(step)

    def unbind(self) -> None:
        """The persistent tensors that were collected last are others than before: steps must be
        bound to them."""
        for step in self._bound:
            step.compiled.unbind()
        self._bound.clear()
        self._version = self._steps.persistent.version

    def release(self) -> None:
        """Lets go of the job's tensors; no captured step will run."""
        for step in self._steps.cache.steps():
            step.compiled.unbind()
        self._bound.clear()

    def begin(self, steps: int = 1) -> None:
        """Steps of the job begin, of whatever kind."""
        self.begun += steps
        if self._steps.tiers is not None:
            self._steps.tiers.note_begun(steps)

    def load(self, step: PreparedStep, batch: PreparedBatch) -> None:
        """Gives the tape its batch and the hyperparameters of this step."""
        assert batch.flat is not None
        assert batch.specialization is not None
        self.begin()
        self.unchecked += 1
        batch.specialization.runs += 1
        tensors = batch.flat.tensors
        if batch.pinned is not None:
            assert self._steps.prefetcher is not None
            self._steps.prefetcher.send(batch.pinned)
            tensors = self._steps.prefetcher.receive(batch.pinned)
        step.compiled.tape.set_batch(tensors)
        for register, value in self._steps.binder.registers(step).items():
            step.compiled.tape.set_register(register, value)

    # Many steps

    def watch(
        self, step: PreparedStep, specialization: Specialization, between: Between
    ) -> Watched | None:
        """Gives the tape the hyperparameters, and says what must hold for it to be run again.

        Args:
            step: the job's ready step.
            specialization: its own.
            between: what comes after each step; where that is Python, this is asked anew for each.

        Returns:
            None where the hyperparameters have outgrown the step.
        """
        found = self._watched
        known = (step, between, self._parts(specialization))
        if found is None or (found.step, found.between, found.parts) != known:
            found = self._watch_anew(step, specialization, between)
            if found.look is not None and self._steps.cache.step_for(specialization) is not step:
                return None
        return self._with_registers(found)

    def again(self, batch: PreparedBatch, between: Between) -> Watched | None:
        """The same where nothing was found changed since the step before, which was the same: it is
        for the extension to look before it makes this one. None where it takes a closer look."""
        found, step_of = self._watched, batch.specialization
        if found is None or step_of is not found.specialization or found.between is not between:
            return None
        is_bound = found.step in self._bound and self._is_collected_for(step_of)
        if self.exclusive or not (is_bound and self._has_room(batch)):
            return None
        if self._steps.caller.opaque is not None:
            return None
        if found.parts != self._parts(step_of) or not self._steps.cache.has(batch):
            return None
        if between is Between.NUMBERS and self._steps.cache.step_for(step_of) is not found.step:
            return None
        return None if self.is_to_check(step_of, found.step) else self._with_registers(found)

    def watch_one(self, watched: Watched) -> Watched:
        """The same for one step, as it was found to be ready."""
        step = watched.step
        registers = self._steps.binder.registers(step, step.valid_values)
        return self._with_registers(replace(watched, look=None, registers=registers))

    def _with_registers(self, watched: Watched) -> Watched:
        for register, value in watched.registers.items():
            watched.step.compiled.tape.set_register(register, value)
        return watched

    def _parts(self, specialization: Specialization) -> tuple[Any, ...]:
        return (*specialization.assumptions.guards, self._steps.persistent.entries.guards)

    def _watch_anew(
        self, step: PreparedStep, specialization: Specialization, between: Between
    ) -> Watched:
        parts, look = self._parts(specialization), None
        wary = between is Between.PYTHON and self.begun < self._wary_until
        if not (wary or self._distrusts_looks):
            # Guarded before they are read: what changes in between does not hold at the first look.
            but = WRITTEN if between is Between.NUMBERS else frozenset[str]()
            numbers = watch_hyperparameters(self._steps.job.optimizer, but)
            look = None if numbers is None else self._steps.caller.look_at([*parts, numbers])
        # Not guarded, they are what they were when the step was chosen.
        chosen = step.valid_values if look is None else None
        registers = self._steps.binder.registers(step, chosen)
        watched = Watched(step, specialization, look, registers, parts, between)
        self._watched = None if look is None else watched
        return watched

    def foretell(self, watched: Watched) -> Foretold | None:
        """What the job's schedulers do after each of the next steps, with the numbers of the first
        for its tape; None where that is to be seen after each."""
        foretold = self._foreteller.foretell(watched.step, self.begun)
        if foretold is not None:
            for register, value in foretold.registers.items():
                watched.step.compiled.tape.set_register(register, value)
        return foretold

    def before_check(self, step: PreparedStep, most: int) -> int:
        """How many steps, `most` at most, may be made of this one before one is to be checked."""
        seconds = self.seconds_of(step)
        if not self.checks.is_due(self.begun + most, seconds):
            return most
        due = (n for n in range(1, most) if self.checks.is_due(self.begun + 1 + n, seconds))
        return next(due, most)

    def count(self, batch: PreparedBatch, steps: int, seconds: float, worked: float) -> None:
        """So many steps on such batches were made by a train, in so many seconds of the lane, so
        many of which its thread has worked."""
        assert batch.specialization is not None
        self.begin(steps)
        self.unchecked += steps
        batch.specialization.runs += steps
        if not steps:
            return
        self.step_seconds = seconds / steps
        self._distrusts_looks = False
        if self._steps.tiers is not None and batch.flat is not None:
            self._steps.tiers.note_captured_steps(batch.flat.signature, steps, worked)

    def look_again(self, made: int) -> None:
        """A train has met a change, after so many steps: what was known of Python's state is not.

        One that has not even begun may have been misled by its look; the next step goes by the one
        that `is_as_known` takes.
        """
        self._watched = None
        self._looked = (None, 0, False)
        self._found = (None, 0, None)
        self._distrusts_looks = not made
        self._wary_until = self.begun + _WARY_STEPS  # what the user's Python changes once, it may
        # change after each step: then a closer look comes first, which can tell what follows

    def take_state(self, step: PreparedStep) -> None:
        """After a first step: what it made becomes the optimizer's state."""
        tape = step.compiled.tape
        made = {key: tape.slot(slot) for key, slot in step.compiled.outputs.items()}
        self._steps.persistent.put_state(step, made)
        tape.clear(list(step.compiled.outputs.values()))
        self._steps.cache.collect_persistent()
        self.unbind()

    def take_gradients(self, step: PreparedStep) -> None:
        """What the step has left becomes the parameters' gradients."""
        parameters = trained_parameters(self._steps.job.optimizer)
        tape = step.compiled.tape
        for parameter in parameters:
            parameter.grad = None
        for key, slot in step.compiled.outputs.items():
            parameters[key[1]].grad = tape.slot(slot)  # type: ignore[index]
        tape.clear(list(step.compiled.outputs.values()))

    # How its batches come

    def _has_room(self, batch: PreparedBatch) -> bool:
        prefetcher = self._steps.prefetcher
        return prefetcher is None or batch.pinned is None or prefetcher.fits(batch.pinned)

    def open_input(self, batch: PreparedBatch | None, lanes: Lanes, residency: Residency) -> None:
        """Opens the job's device input, or a larger one where this batch needs it.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        prefetcher = self._steps.prefetcher
        if prefetcher is None or not prefetcher.size:
            return
        if batch is None or batch.pinned is None or not prefetcher.fits(batch.pinned):
            prefetcher.open(self._number, lanes.scope, residency)

    def send_ahead(self, fed: FeedItem[PreparedBatch] | None) -> None:
        """Queues the copy of the next batch to the device, if there is one and it has room."""
        prefetcher = self._steps.prefetcher
        if fed is None or fed.item is None or fed.item.pinned is None or prefetcher is None:
            return
        if prefetcher.fits(fed.item.pinned):
            prefetcher.send(fed.item.pinned)
