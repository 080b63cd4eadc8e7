"""Turns a job's batches into steps that are ready to run: capture, compile, profile, per shape."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from waterflow.capture.assumptions import Assumptions, Seen
from waterflow.capture.caller import CallerContext
from waterflow.capture.forward import ForwardTrace, trace_forward
from waterflow.capture.join import join
from waterflow.capture.opaque import why_opaque
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.tracing import StateMovedError, capture_error, reason_of, users_line
from waterflow.common.errors import CaptureError, OpaqueStepWarning
from waterflow.executor.data.staging import BatchPrefetcher, PinnedBatch
from waterflow.executor.device.device import Device
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.round_plan import StepMemory
from waterflow.executor.profile.measured import Scratch
from waterflow.executor.run.residency import storage_bytes
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.tape import CompiledStep, compile_step
from waterflow.job.batch import FlatBatch, UnknownLeafError, flatten
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    HyperKey,
    Layout,
    NotCapturableError,
    StateEntries,
    hyperparameters,
    trained_parameters,
)
from waterflow.partitioner.graph.effects import draws_on_host
from waterflow.partitioner.graph.step_graph import Input, StepGraph
from waterflow.partitioner.profile import Profile

if TYPE_CHECKING:
    from waterflow.steps.audit import CheckedStep

#: More step graphs than this for one job mean that its batches never repeat a shape.
MAX_SHAPES = 64
#: Captures kept for batches of one signature: what a step reads may change back and forth.
_KEPT_CAPTURES = 4
#: A job whose captures have gone stale more often than this runs eagerly.
_MOST_RECAPTURES = 32
#: One whose captures go stale within so few turns does, too, the third time: they cost more.
_HASTY_TURNS, _MOST_HASTY = 8, 2
#: So many checked steps may change what later steps read, as caches do that settle.
_MOST_MOVES = 1


_Traces = tuple[OptimizerTrace | None, OptimizerTrace | None]
"""Of the optimizer: the first step (None where its state exists), and later ones (None: eager)."""


_Find = Callable[[Hashable], "Specialization | None"]


class _TrialNeeded(Exception):
    """No error: before a trace, eager steps have to show that they move nothing for good."""


class _ManyShapesError(CaptureError):
    """Another shape of batches would be one too many; those known are captured all the same."""


@dataclass(eq=False)
class PreparedStep:
    """A step graph of a job, compiled and profiled.

    Attributes:
        graph: the step graph.
        compiled: its tape.
        optimizer: the optimizer's trace in it, None where the optimizer runs eagerly.
        memory: its profile, ready for planning.
        piles: the step piled up, where it flows.
    """

    graph: StepGraph
    compiled: CompiledStep
    optimizer: OptimizerTrace | None
    memory: StepMemory = field(init=False)
    piles: Piles = field(init=False)
    valid_values: Mapping[HyperKey, Any] | None = None  # hyperparameters last found valid

    @property
    def creates_state(self) -> bool:
        """Whether it is a first step, which makes the optimizer's state."""
        return bool(self.optimizer is not None and self.graph.outputs)


@dataclass(eq=False)
class Specialization:
    """All that is prepared for batches of one signature, while what it assumes holds.

    Attributes:
        forward: the traced forward and backward pass.
        assumptions: what the captures have taken for granted.
        first: the step that creates the optimizer's state, None where it is there already.
        steady: the step of every later turn.
        checked: steps that an eager step has confirmed.
        turns: steps made of it so far.
        outgrown: whether another capture for such batches has been counted since.
    """

    forward: ForwardTrace
    assumptions: Assumptions
    first: PreparedStep | None = None
    steady: PreparedStep | None = None
    checked: set[PreparedStep] = field(default_factory=set)
    turns: int = 0
    outgrown: bool = False


@dataclass(eq=False)
class PreparedBatch:
    """A batch with what can run it; `shape` is None where the whole step runs eagerly.

    `pinned` is there for a batch that has yet to be brought to the device. `trial` says that this
    eager step has to show whether later ones may be traced.
    """

    batch: Any
    flat: FlatBatch | None = None
    shape: Specialization | None = None
    pinned: PinnedBatch | None = None
    trial: bool = False


@dataclass(eq=False)
class Preparer:
    """Prepares one job's steps, on its feeder's thread.

    Attributes:
        job: the job.
        device: where it trains.
        rng: its random streams; never advanced here.
        prefetcher: brings its batches to the device, None where they are there already.
        threads: intra-op threads of the lanes, part of a profile's identity.
        traces: of optimizers' steps, shared with the jobs beside it.
        caller: the context of the thread that submitted the job.
        may_try: whether eager steps may come first, to be observed.
        notes: what the report should say about the job.
        opaque_step: why all steps run eagerly, None where they are captured.
        opaque_optimizer: why the optimizer runs eagerly, None where it is captured.
        recaptures: captures made because something that a step reads had changed.
        version: counts the changes of the set of persistent tensors.
        replaces_tensors: whether the model was ever given other tensors.
    """

    job: Job
    device: Device
    rng: JobRng
    threads: int
    prefetcher: BatchPrefetcher | None = None
    traces: OptimizerTraces = field(default_factory=OptimizerTraces)
    caller: CallerContext = field(default_factory=CallerContext)
    may_try: bool = True
    notes: list[str] = field(default_factory=list)
    opaque_step: str | None = None
    opaque_optimizer: str | None = None
    draws: bool = False
    state_exists: bool = False
    persistent: dict[Input, torch.Tensor] = field(default_factory=dict)
    final_persistent_bytes: int = 0
    recaptures: int = 0
    version: int = 0
    replaces_tensors: bool = False
    _shapes: dict[Hashable, list[Specialization]] = field(default_factory=dict)
    _noted: set[tuple[Input, int, int]] = field(default_factory=set)
    _state: StateEntries = field(init=False)  # of the optimizer, as last collected
    _with_state: set[PreparedStep] = field(default_factory=set)  # first steps that are over
    _latest: Specialization | None = None  # of the batch made ready last
    _moves: int = 0
    _hasty: int = 0
    _dropped: int = 0  # captures that went with the optimizer's state
    _seen: Seen | None = None  # what steps have executed that had to be tried before a trace
    _tried: set[Hashable] = field(default_factory=set)  # signatures of batches that were
    _refusal: str | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        if self.job.capture is not False and self.device.inbox() is not None:
            self.prefetcher = BatchPrefetcher(self.device)
        self.note_persistent()
        self._refusal = why_opaque(self.job, self.caller)
        if self.job.capture is False:
            self.opaque_step, self.draws = "the job has capture=False", True
        elif self._refusal is not None and self.job.capture == "auto":
            self.become_opaque(self._refusal)

    def note_persistent(self) -> None:
        """Collects the job's persistent tensors as they are now.

        Captures for other state tensors of the optimizer than there are now are dropped.
        """
        shapes = _state_shapes(self.persistent)
        self.persistent = persistent_tensors(self.job)
        self.state_exists = any(meaning.kind == "state" for meaning in self.persistent)
        self._state = StateEntries(self.job.optimizer)
        before, self._noted = self._noted, _identities(self.persistent)
        if before != self._noted:
            self.version += 1
            self._with_state.clear()
            changed = {meaning.kind for meaning, *_ in before - self._noted}
            self.replaces_tensors = self.replaces_tensors or bool(changed - {"state"})
            if shapes - _state_shapes(self.persistent):
                self._dropped += bool(self._shapes)
                self._shapes.clear()
        self.final_persistent_bytes = max(self.final_persistent_bytes, self.persistent_bytes)

    def state_holds(self) -> bool:
        """Whether the optimizer's state has the entries that it had when it was last collected."""
        return self._state.holds(self.job.optimizer)

    @property
    def persistent_bytes(self) -> int:
        """Bytes that the job holds between steps, now."""
        size = storage_bytes([*self.persistent.values(), *self._constants()], self.device)
        return size + self._inbox_bytes

    @property
    def _inbox_bytes(self) -> int:
        return 0 if self.prefetcher is None else self.prefetcher.size

    def all_persistent(self) -> list[torch.Tensor]:
        """Every tensor that should live in the arena while the job is in it."""
        return [*self.persistent.values(), *self._constants()]

    def mutated(self) -> list[torch.Tensor]:
        """The tensors that some step writes to: persistent ones, and constants of its own."""
        if self.opaque_step is not None or self.opaque_optimizer is not None:
            return list(self.persistent.values())
        written: dict[int, torch.Tensor] = {}
        for step in self.steps():
            inputs = self.inputs_of(step)
            found = (inputs[meaning] for meaning in step.graph.mutated if meaning in inputs)
            written.update((id(tensor), tensor) for tensor in found)
        return list(written.values())

    def steps(self) -> list[PreparedStep]:
        """All prepared steps."""
        shapes = [shape for shapes in list(self._shapes.values()) for shape in list(shapes)]
        return [step for shape in shapes for step in (shape.first, shape.steady) if step]

    def _constants(self) -> list[torch.Tensor]:
        return [tensor for step in self.steps() for tensor in step.graph.constants]

    def __call__(
        self, batch: Any, before_capture: Callable[[], None] = lambda: None
    ) -> PreparedBatch:
        """Makes a batch ready to run.

        Args:
            batch: as the data yields it.
            before_capture: called before a new shape is captured and profiled, which touches the
                job's tensors: returns when no step of the job is under way.

        Raises:
            CaptureError: the step cannot be captured exactly.
        """
        # A batch that is fetched ahead is looked at when its turn comes: the steps before it may
        # change what its step reads.
        find = self._known_shape if self.draws_apart else self.valid_shape
        ready = self._made_ready(batch, before_capture, find)
        self._latest = ready.shape
        return ready

    @property
    def draws_apart(self) -> bool:
        """Whether the latest batch's step leaves the job's random streams alone: it is captured, a
        check has shown what it does, and it draws nothing."""
        shape = self._latest
        return not self.draws and shape is not None and shape.steady in shape.checked

    def _made_ready(
        self, batch: Any, before_capture: Callable[[], None], find: _Find
    ) -> PreparedBatch:
        """The batch with what `find` has for its signature, captured where that is nothing."""
        if self.opaque_step is not None or (not self._shapes and _is_lazy(self.job.model)):
            return PreparedBatch(batch)
        if self._refusal is not None:
            self.become_opaque(self._refusal)
        try:
            flat = flatten(batch)
            return self._ready(batch, flat, before_capture, find)
        except UnknownLeafError as error:
            return self._refused(
                batch,
                CaptureError(
                    f"job {self.job.name!r}: a batch holds a {error.args[0]}, which may hide "
                    "tensors from the capture. Make batches of tensors, numbers, strings, "
                    "sequences, mappings and data classes, or give the job capture=False.",
                    f"a batch holds a {error.args[0]}, which may hide tensors from the capture",
                ),
                for_good=False,
            )
        except _TrialNeeded:
            return PreparedBatch(batch, flat, trial=True)
        except StateMovedError as error:  # what settles with the first step settles by trial
            if flat.signature in self._tried:
                return self._refused(batch, error)
            return PreparedBatch(batch, flat, trial=True)
        except CaptureError as error:
            return self._refused(batch, error, for_good=not isinstance(error, _ManyShapesError))
        except Exception as error:
            if self.job.capture is True:
                raise
            return self._refused(batch, error)

    def _refused(self, batch: Any, error: Exception, for_good: bool = True) -> PreparedBatch:
        """The batch for an eager step, where the job allows that."""
        if self.job.capture is True:
            own = isinstance(error, CaptureError)
            raise CaptureError(str(error), error.reason) if own else error  # type: ignore[attr-defined]
        reason = error.reason if isinstance(error, CaptureError) else None
        if reason is None:
            reason = str(error) if isinstance(error, CaptureError) else reason_of(error)
        if for_good:
            self.become_opaque(reason)
        else:
            self._note(f"some steps run as eager Python, because {reason}")
        return PreparedBatch(batch)

    def become_opaque(self, reason: str) -> None:
        """From now on the job's steps run eagerly.

        Raises:
            CaptureError: the job insists on capture.
        """
        if self.job.capture is True:
            raise capture_error(self.job.name, reason, users_line(None, self.job.loss))
        self.opaque_step = reason
        self.draws = True
        self._note(f"the step runs as eager Python, because {reason}")

    def _note(self, text: str) -> None:
        if text in self.notes:
            return
        self.notes.append(text)
        with contextlib.suppress(Warning):  # filters may turn it into an error
            warnings.warn(f"job {self.job.name!r}: {text}", OpaqueStepWarning, stacklevel=2)

    def _ready(
        self, batch: Any, flat: FlatBatch, before_capture: Callable[[], None], find: _Find
    ) -> PreparedBatch:
        flat, pinned = self._on_its_way(flat)
        shape = find(flat.signature)
        if shape is None:
            before_capture()  # not under the lock: the step under way may need it
            if self.opaque_step is not None:  # that step has shown it
                return PreparedBatch(batch)
            with self._lock:  # a callback may have run meanwhile
                shape = self.valid_shape(flat.signature) or self._capture(flat)
        return PreparedBatch(batch, flat, shape, pinned)

    def _known_shape(self, signature: Hashable) -> Specialization | None:
        """What was prepared for such batches last, right or not; None where there is nothing."""
        shapes = self._shapes.get(signature, ())
        return self._latest if self._latest in shapes else next(reversed(shapes), None)

    def valid_shape(self, signature: Hashable) -> Specialization | None:
        """What is prepared for such batches and still right; None where there is nothing."""
        shapes = self._shapes.get(signature, ())
        return next((shape for shape in list(shapes) if shape.assumptions.hold()), None)

    def _on_its_way(self, flat: FlatBatch) -> tuple[FlatBatch, PinnedBatch | None]:
        """The batch packed for the device; one that the data has put there is brought as a whole.

        Lanes do not wait for the streams of the user's threads, so this one does.
        """
        if self.prefetcher is None:
            return flat, None
        if all(tensor.device.type == "cpu" for tensor in flat.tensors):
            return flat, self.prefetcher.pack(flat.tensors)
        there = [tensor.to(self.device.tensors) for tensor in flat.tensors]
        self.device.wait_for_thread()
        return dataclasses.replace(flat, tensors=there), None

    def refresh(self, ready: PreparedBatch) -> PreparedBatch:
        """The same batch, captured again where what the step reads has changed since."""
        if not self.state_holds():
            self.note_persistent()
        if self.is_fresh(ready):
            return ready
        ready = self._made_ready(ready.batch, lambda: None, self.valid_shape)
        self._latest = ready.shape
        return ready

    def is_fresh(self, ready: PreparedBatch) -> bool:
        """Whether the batch can run as it was made ready."""
        if ready.shape is None:
            return True
        assert ready.flat is not None
        known = self.opaque_step is None and ready.shape in self._shapes.get(
            ready.flat.signature, ()
        )
        return known and ready.shape.assumptions.hold()

    def _capture(self, flat: FlatBatch) -> Specialization:
        """Captures the step for such batches, as the user's Python is now."""
        former = self._shapes.setdefault(flat.signature, [])
        self.recaptures, self._dropped = self.recaptures + self._dropped, 0
        if former:
            self._count_recapture(former[-1])
        elif len(self._shapes) > MAX_SHAPES:
            del self._shapes[flat.signature]
            raise _ManyShapesError(
                f"job {self.job.name!r}: its batches have had {MAX_SHAPES} different shapes (or "
                "plain values) and each needs a capture of its own. Pad or bucket the batches, "
                "pass changing numbers as tensors, or give the job capture=False.",
                f"batches have had {MAX_SHAPES} different shapes before",
            )
        self.note_persistent()
        shape = self._prepare(flat)
        if shape.forward.reassigned and self.job.on_step is not None:
            raise capture_error(
                self.job.name,
                f"the step gives its buffer {shape.forward.reassigned[0]!r} a new tensor, and a "
                "callback may hold the former one",
                users_line(None, self.job.loss),
            )
        shapes = self._shapes.setdefault(flat.signature, [])
        shapes.append(shape)
        del shapes[:-_KEPT_CAPTURES]
        return shape

    def _count_recapture(self, former: Specialization) -> None:
        if former.outgrown:  # trials have come between
            return
        former.outgrown = True
        self.recaptures += 1
        self._hasty += former.turns < _HASTY_TURNS
        if self.recaptures > _MOST_RECAPTURES or self._hasty > _MOST_HASTY:
            changed = former.assumptions.difference() or "what the step reads"
            raise CaptureError(
                f"job {self.job.name!r}: {changed} has changed {self.recaptures} times, and each "
                "time needs a capture of its own. Make it a tensor (a buffer of the model), or "
                "give the job capture=False.",
                f"{changed} changes too often for captures",
            )

    def judge(self, shape: Specialization, step: PreparedStep, checked: CheckedStep) -> None:
        """Whether a step that was checked may be replayed from now on.

        Raises:
            CaptureError: it may not, and the job insists on capture.
        """
        if checked.difference is not None:
            self.become_opaque(
                "its captured step gives other numbers than the eager one: "
                f"{checked.difference} ({users_line(None, self.job.loss)})"
            )
            return
        if checked.adopted:
            return
        moved = shape.assumptions.difference()
        if moved is not None:  # some settle with the first step, as caches do
            self._moves += 1
            self.forget(shape)
            if self._moves > _MOST_MOVES:
                self.become_opaque(self._moving(moved))
            return
        problem = shape.assumptions.narrow(checked.seen)
        if self._seen is not None:
            self._seen = shape.assumptions.seen
        if problem is not None:
            self.become_opaque(problem)
        else:
            shape.checked.add(step)

    def begin_trial(self) -> Assumptions | None:
        """Before an eager step that is a trial: what there is now; None before the first one, which
        shows what to look at."""
        if self._seen is None:
            return None
        return Assumptions(self.job, self.caller, seen=self._seen)

    def end_trial(self, ready: PreparedBatch, before: Assumptions | None, observer: Any) -> None:
        """After it: whether steps on such batches may be traced.

        Raises:
            CaptureError: they may not, and the job insists on capture.
        """
        moved = None if before is None else before.difference()
        now = before or Assumptions(self.job, self.caller, seen=Seen.by(observer))
        problem = now.narrow(observer)
        self._seen = now.seen
        if moved is not None:  # some settle with the first step, as caches do
            self._moves += 1
            problem = self._moving(moved) if self._moves > _MOST_MOVES else problem
        if problem is not None:
            self.become_opaque(problem)
        elif before is not None and moved is None:
            assert ready.flat is not None
            self._tried.add(ready.flat.signature)

    def put_back_buffers(self, shape: Specialization) -> None:
        """After an eager step: buffers that it gave new tensors have their own again, as graphs
        know them, with the new values."""
        for name in shape.forward.reassigned:
            owner, _, attribute = name.rpartition(".")
            buffers = self.job.model.get_submodule(owner)._buffers
            own, now = self.persistent[Input("buffer", name)], buffers.get(attribute)
            if now is not None and now is not own and Layout.of(now) == Layout.of(own):
                with torch.no_grad():
                    own.copy_(now)
                buffers[attribute] = own

    def _moving(self, what: str) -> str:
        where = "" if ".py:" in what else f" ({users_line(None, self.job.loss)})"
        return f"the step changes {what}{where}"

    def forget(self, shape: Specialization) -> None:
        """Drops a capture."""
        for shapes in self._shapes.values():
            if shape in shapes:
                shapes.remove(shape)

    def step_for(self, shape: Specialization) -> PreparedStep | None:
        """The step to run now; None where the hyperparameters have outgrown the graph."""
        step = shape.steady
        if shape.first is not None and not self._has_state(shape.first):
            step = shape.first
        if step is None or step.optimizer is None:
            return step
        values = hyperparameters(self.job.optimizer)
        if step.valid_values != values and step.optimizer.valid_for(values):
            step.valid_values = values
        return step if step.valid_values == values else None

    def _has_state(self, first: PreparedStep) -> bool:
        """Whether all that a first step creates is there."""
        if first not in self._with_state:
            keys = first.graph.outputs
            if not all(Input("state", key) in self.persistent for key in keys):
                return False
            self._with_state.add(first)
        return True

    def renew(self, shape: Specialization, flat: FlatBatch) -> None:
        """Captures the optimizer's step again, for the hyperparameters as they are now."""
        with self._lock:
            with TraceWatch(self.job, self.rng, self.caller, self._seen) as watch:
                traces = self._optimizer_traces(shape.forward, watch)
            self._add_steps(shape, flat, traces)

    def _prepare(self, flat: FlatBatch) -> Specialization:
        tried = flat.signature in self._tried
        if self._seen is not None and not tried:
            raise _TrialNeeded
        may_try = self.may_try and not tried
        with TraceWatch(self.job, self.rng, self.caller, self._seen, may_try) as watch:
            if not tried and watch.assumptions.risk() is not None:
                raise _TrialNeeded
            forward = trace_forward(self.job, flat, watch)
            traces = self._optimizer_traces(forward, watch)
            assumptions = watch.assumptions
            if self.opaque_optimizer is not None:
                assumptions = Assumptions(
                    self.job, self.caller, with_optimizer=False, seen=self._seen
                )
        shape = Specialization(forward, assumptions)
        self._add_steps(shape, flat, traces)
        return shape

    def _add_steps(self, shape: Specialization, flat: FlatBatch, traces: _Traces) -> None:
        first, steady = traces
        steps: list[PreparedStep] = []
        for trace in (first, steady) if first is not None else (steady,):
            graph = join(self.job, shape.forward, trace)
            steps.append(PreparedStep(graph, compile_step(graph), trace))
            steps[-1].compiled.inbox = None if self.prefetcher is None else self.prefetcher.inbox
            self.draws = self.draws or any(map(draws_on_host, graph.nodes))
        self._profile(steps, flat)
        shape.first = steps[0] if len(steps) == 2 else None
        shape.steady = steps[-1]
        self._note_final_size(first, steps)

    def _optimizer_traces(self, forward: ForwardTrace, watch: TraceWatch) -> _Traces:
        """The first step's trace (None where the state exists) and the steady one."""
        if self.opaque_optimizer is not None:
            return None, None
        try:
            return self.traces.of(self.job, forward, watch)
        except NotCapturableError as error:
            name = type(self.job.optimizer).__name__
            self.opaque_optimizer = f"{name} cannot be captured exactly: {error}"
            self._note(f"the optimizer runs as eager Python, because {self.opaque_optimizer}")
            return None, None

    def _note_final_size(self, first: OptimizerTrace | None, steps: list[PreparedStep]) -> None:
        constants = [tensor for step in steps for tensor in step.graph.constants]
        size = storage_bytes([*self.all_persistent(), *constants], self.device)
        size += self._inbox_bytes
        if first is not None:
            new = [node.meta["val"] for node in first.outputs.values()]
            size += storage_bytes(new, self.device)
        self.final_persistent_bytes = max(self.final_persistent_bytes, size)

    # Profiles

    def _profile(self, steps: list[PreparedStep], flat: FlatBatch) -> None:
        paths = [_profile_path(step.graph, self.threads, self.device) for step in steps]
        cached = [_read_profile(path) for path in paths]
        if any(profile is None for profile in cached):
            cached = list(self.device.profile(lambda: self._measure(steps, flat)))
            for path, profile in zip(paths, cached, strict=True):
                _write_profile(path, profile)
        for step, profile in zip(steps, cached, strict=True):
            assert profile is not None
            if profile.num_nodes != len(step.compiled.tape):
                raise AssertionError("a cached profile does not match its step")
            step.memory = StepMemory(profile, self.device.alignment)
            step.piles = Piles(step.memory)

    def _measure(self, steps: list[PreparedStep], flat: FlatBatch) -> list[Profile]:
        """Runs the steps in turn on scratch copies of all that they write to."""
        scratch = Scratch(self.device)
        profiles: list[Profile] = []
        made: dict[Input, torch.Tensor] = {}
        generators = self.rng.copy().generators
        try:
            twins = self.twins(scratch, steps, written_only=True)
            batch = scratch.batch(flat.tensors)
            for step, tensors in zip(steps, twins, strict=True):
                inputs = {**tensors, **made}
                scratch.bind(step.compiled, inputs, batch, generators, self.registers(step))
                profile = scratch.measure(
                    step.compiled, name=self.job.name, repeatable=not step.creates_state
                )
                profiles.append(profile)
                for key, slot in step.compiled.outputs.items():
                    made[Input("state", key)] = step.compiled.tape.slot(slot)
            made.clear()
            del twins, batch
        finally:
            for step in steps:
                step.compiled.unbind()
            scratch.close()
        return profiles

    def twins(
        self, scratch: Scratch, steps: Sequence[PreparedStep], *, written_only: bool = False
    ) -> list[dict[Input, torch.Tensor]]:
        """What each step may be bound to in place of the job's own tensors.

        What the inputs share, their copies share.

        Args:
            scratch: where the copies are made.
            steps: the steps.
            written_only: copies only what a step writes to; the rest are the job's own.
        """
        inputs = [self.inputs_of(step) for step in steps]
        keyed = {(n, meaning): t for n, held in enumerate(inputs) for meaning, t in held.items()}
        mutated = {meaning for step in steps for meaning in step.graph.mutated}
        written = {
            key
            for key in keyed
            if not written_only or key[1] in mutated or key[1].kind == "constant"
        }
        copies = scratch.twins(keyed, written)
        return [
            {meaning: copies[number, meaning] for meaning in held}
            for number, held in enumerate(inputs)
        ]

    def inputs_of(self, step: PreparedStep) -> dict[Input, torch.Tensor]:
        """The job's persistent tensors, and those that the step knows as constants."""
        constants = {Input("constant", i): t for i, t in enumerate(step.graph.constants)}
        return {**self.persistent, **constants}

    def registers(self, step: PreparedStep) -> dict[int, float]:
        """Values of the step's live hyperparameters, by register."""
        values: Mapping[HyperKey, Any] = hyperparameters(self.job.optimizer)
        return {register: values[key] for key, register in step.compiled.registers.items()}  # type: ignore[index]

    def bind(self, step: PreparedStep) -> None:
        """Gives the step its persistent tensors and the job's random streams."""
        step.compiled.bind(self.inputs_of(step))
        step.compiled.tape.set_generators(*self.rng.generators)

    def put_state(self, step: PreparedStep, made: Mapping[Hashable, torch.Tensor]) -> None:
        """After a first step: what it made becomes the optimizer's state."""
        parameters = trained_parameters(self.job.optimizer)
        entries: dict[Any, Any] = {**made, **step.graph.plain_state}
        layout = step.optimizer.state_after if step.optimizer is not None else []
        for index, keys in enumerate(layout):
            if keys:
                state = {key: entries[index, key] for key in keys if (index, key) in entries}
                self.job.optimizer.state[parameters[index]] = state


def persistent_tensors(job: Job) -> dict[Input, torch.Tensor]:
    """Parameters, buffers and the optimizer's state, as they are now.

    Tensors without plain memory of their own (sparse ones, parameters that are not made yet) are
    left out: steps that have them run eagerly.
    """
    found: dict[Input, torch.Tensor] = {}
    found.update({Input("parameter", n): p for n, p in job.model.named_parameters()})
    found.update({Input("buffer", n): b for n, b in job.model.named_buffers()})
    for index, parameter in enumerate(trained_parameters(job.optimizer)):
        state = job.optimizer.state
        for key, value in state[parameter].items() if parameter in state else ():
            if isinstance(value, torch.Tensor):
                found[Input("state", (index, key))] = value
    return {meaning: tensor for meaning, tensor in found.items() if _has_memory(tensor)}


#: Tensors of lazy modules, until their first step makes them.
_UNMADE = (UninitializedParameter, UninitializedBuffer)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not isinstance(tensor, _UNMADE)


def _is_lazy(model: torch.nn.Module) -> bool:
    """Whether some of the model's tensors will be made by its first step."""
    return any(isinstance(tensor, _UNMADE) for tensor in (*model.parameters(), *model.buffers()))


def _identities(tensors: Mapping[Input, torch.Tensor]) -> set[tuple[Input, int, int]]:
    return {(meaning, id(t), t.untyped_storage()._cdata) for meaning, t in tensors.items()}


def _state_shapes(tensors: Mapping[Input, torch.Tensor]) -> set[tuple[Input, Layout]]:
    return {(m, Layout.of(t)) for m, t in tensors.items() if m.kind == "state"}


def cache_directory() -> Path:
    """Where profiles are kept: ``$WATERFLOW_CACHE``, else ``~/.cache/waterflow``."""
    configured = os.environ.get("WATERFLOW_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "waterflow"


def _profile_path(graph: StepGraph, threads: int, device: Device) -> Path:
    """Profiles depend on the graph, on torch and its kernels, and on the number of threads."""
    parts = (graph.fingerprint(), torch.__version__, device.identity, str(threads))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cache_directory() / "profiles" / f"{digest}.npz"


def _read_profile(path: Path) -> Profile | None:
    try:
        return Profile.from_npz(path)
    except (OSError, ValueError):
        return None  # not there, or damaged: it is measured again


def _write_profile(path: Path, profile: Profile | None) -> None:
    assert profile is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.to_npz(path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
