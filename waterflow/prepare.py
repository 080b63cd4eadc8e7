"""Turns a job's batches into steps that are ready to run: capture, compile, profile, per shape."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from waterflow.batch import FlatBatch, UnknownLeafError, flatten
from waterflow.capture import join
from waterflow.executor.device import Device
from waterflow.executor.flow import PiledStep
from waterflow.executor.measure import Scratch
from waterflow.executor.plan import StepMemory
from waterflow.executor.residence import storage_bytes
from waterflow.executor.rng import copy_generator
from waterflow.executor.staging import Mailbox, Parcel
from waterflow.executor.tape import CompiledStep, compile_step
from waterflow.forward import ForwardTrace, trace_forward
from waterflow.job import Job
from waterflow.optimizer_state import (
    HyperKey,
    NotCapturableError,
    hyperparameters,
    state_layout,
    trained_parameters,
)
from waterflow.optimizer_step import OptimizerTrace
from waterflow.optimizer_traces import OptimizerTraces
from waterflow.partitioner.effects import draws_on_host
from waterflow.partitioner.errors import CaptureError
from waterflow.partitioner.graph import Input, StepGraph
from waterflow.partitioner.profile import Profile

#: More step graphs than this for one job mean that its batches never repeat a shape.
MAX_SHAPES = 64


@dataclass(eq=False)
class PreparedStep:
    """A step graph of a job, compiled and profiled.

    Attributes:
        graph: the step graph.
        compiled: its tape.
        optimizer: the optimizer's trace in it, None where the optimizer runs eagerly.
        memory: its profile, ready for planning.
    """

    graph: StepGraph
    compiled: CompiledStep
    optimizer: OptimizerTrace | None
    memory: StepMemory = field(init=False)
    piles: dict[tuple[float, int], PiledStep] = field(default_factory=dict)  # see executor.flow
    valid_values: Mapping[HyperKey, Any] | None = None  # hyperparameters last found valid

    @property
    def creates_state(self) -> bool:
        """Whether it is a first step, which makes the optimizer's state."""
        return bool(self.optimizer is not None and self.graph.outputs)


@dataclass(eq=False)
class Shape:
    """All that is prepared for batches of one signature.

    Attributes:
        forward: the traced forward and backward pass.
        first: the step that creates the optimizer's state, None where it is there already.
        steady: the step of every later turn.
        modes: the model's flags and plain attributes that the trace has taken for granted.
    """

    forward: ForwardTrace
    modes: Hashable
    first: PreparedStep | None = None
    steady: PreparedStep | None = None


@dataclass(eq=False)
class Ready:
    """A batch with what can run it; `shape` is None where the whole step runs eagerly.

    `parcel` is there for a batch that has yet to be brought to the device.
    """

    batch: Any
    flat: FlatBatch | None = None
    shape: Shape | None = None
    parcel: Parcel | None = None


@dataclass(eq=False)
class Preparer:
    """Prepares one job's steps, on its feeder's thread.

    Attributes:
        job: the job.
        device: where it trains.
        generators: its random streams, the host's and the device's; never advanced here.
        mailbox: brings its batches to the device, None where they are there already.
        threads: intra-op threads of the lanes, part of a profile's identity.
        traces: of optimizers' steps, shared with the jobs beside it.
        notes: what the report should say about the job.
        opaque_optimizer: why the optimizer runs eagerly, None where it is captured.
    """

    job: Job
    device: Device
    generators: tuple[torch.Generator, torch.Generator | None]
    threads: int
    mailbox: Mailbox | None = None
    traces: OptimizerTraces = field(default_factory=OptimizerTraces)
    notes: list[str] = field(default_factory=list)
    opaque_optimizer: str | None = None
    draws: bool = False
    state_exists: bool = False
    persistent: dict[Input, torch.Tensor] = field(default_factory=dict)
    final_persistent_bytes: int = 0
    _shapes: dict[Hashable, Shape] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.state_exists = any(state_layout(self.job.optimizer))
        self.draws = not self.job.capture
        if self.job.capture and self.device.inbox() is not None:
            self.mailbox = Mailbox(self.device)
        self.note_persistent()

    def note_persistent(self) -> None:
        """Collects the job's persistent tensors as they are now."""
        model = self.job.model
        found: dict[Input, torch.Tensor] = {}
        found.update({Input("parameter", n): p for n, p in model.named_parameters()})
        found.update({Input("buffer", n): b for n, b in model.named_buffers()})
        for index, parameter in enumerate(trained_parameters(self.job.optimizer)):
            for key, value in self.job.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[Input("state", (index, key))] = value
        self.persistent = found
        self.final_persistent_bytes = max(self.final_persistent_bytes, self.persistent_bytes)

    @property
    def persistent_bytes(self) -> int:
        """Bytes that the job holds between steps, now."""
        size = storage_bytes([*self.persistent.values(), *self._constants()], self.device)
        return size + self._inbox_bytes

    @property
    def _inbox_bytes(self) -> int:
        return 0 if self.mailbox is None else self.mailbox.size

    def all_persistent(self) -> list[torch.Tensor]:
        """Every tensor that should live in the arena while the job is in it."""
        return [*self.persistent.values(), *self._constants()]

    def mutated(self) -> list[torch.Tensor]:
        """The persistent tensors that some step writes to."""
        if not self.job.capture or self.opaque_optimizer is not None:
            return list(self.persistent.values())
        found = {meaning for step in self.steps() for meaning in step.graph.mutated}
        return [self.persistent[meaning] for meaning in found if meaning in self.persistent]

    def steps(self) -> list[PreparedStep]:
        """All prepared steps."""
        shapes = self._shapes.values()
        return [step for shape in shapes for step in (shape.first, shape.steady) if step]

    def _constants(self) -> list[torch.Tensor]:
        return [tensor for step in self.steps() for tensor in step.graph.constants]

    def __call__(self, batch: Any, before_capture: Callable[[], None] = lambda: None) -> Ready:
        """Makes a batch ready to run.

        Args:
            batch: as the data yields it.
            before_capture: called before a new shape is captured and profiled, which touches the
                job's tensors: returns when no step of the job is under way.

        Raises:
            CaptureError: the step cannot be captured exactly.
        """
        if not self.job.capture:
            return Ready(batch)
        try:
            flat = flatten(batch)
        except UnknownLeafError as error:
            raise CaptureError(
                f"job {self.job.name!r}: a batch holds a {error.args[0]}, which may hide tensors "
                "from the capture. Make batches of tensors, numbers, strings, sequences, mappings "
                "and data classes, or give the job capture=False."
            ) from None
        flat, parcel = self._on_its_way(flat)
        key = (flat.signature, self._modes())
        if key not in self._shapes:
            before_capture()  # not under the lock: the step under way may need it
            key = (flat.signature, self._modes())  # a callback may have run meanwhile
            with self._lock:
                if key not in self._shapes:
                    self._check_count()
                    self._shapes[key] = self._prepare(flat)
        return Ready(batch, flat, self._shapes[key], parcel)

    def _on_its_way(self, flat: FlatBatch) -> tuple[FlatBatch, Parcel | None]:
        """The batch packed for the device; one that the data has put there is brought as a whole.

        Lanes do not wait for the streams of the user's threads, so this one does.
        """
        if self.mailbox is None:
            return flat, None
        if all(tensor.device.type == "cpu" for tensor in flat.tensors):
            return flat, self.mailbox.pack(flat.tensors)
        there = [tensor.to(self.device.tensors) for tensor in flat.tensors]
        self.device.wait_for_thread()
        return dataclasses.replace(flat, tensors=there), None

    def refresh(self, ready: Ready) -> Ready:
        """The same batch, captured again where a callback has changed the model's modes since."""
        return ready if self.is_fresh(ready) else self(ready.batch)

    def is_fresh(self, ready: Ready) -> bool:
        """Whether the model's modes are still those that the batch was captured with."""
        assert ready.shape is not None
        return ready.shape.modes == self._modes()

    def _modes(self) -> Hashable:
        """What a callback may change between steps: flags, plain attributes, frozen parameters."""
        if self.job.on_step is None:
            return None
        modules = tuple(
            (name, key, value)
            for name, module in self.job.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str))
        )
        return modules, tuple(p.requires_grad for p in self.job.model.parameters())

    def _check_count(self) -> None:
        if len(self._shapes) >= MAX_SHAPES:
            raise CaptureError(
                f"job {self.job.name!r}: its batches have had {MAX_SHAPES} different shapes (or "
                "plain values) and each needs a capture of its own. Pad or bucket the batches, "
                "pass changing numbers as tensors, or give the job capture=False."
            )

    def step_for(self, shape: Shape) -> PreparedStep | None:
        """The step to run now; None where the hyperparameters have outgrown the graph."""
        step = shape.steady if self.state_exists or shape.first is None else shape.first
        if step is None or step.optimizer is None:
            return step
        values = hyperparameters(self.job.optimizer)
        if step.valid_values != values and step.optimizer.valid_for(values):
            step.valid_values = values
        return step if step.valid_values == values else None

    def renew(self, shape: Shape, flat: FlatBatch) -> None:
        """Captures the optimizer's step again, for the hyperparameters as they are now."""
        with self._lock:
            self._add_steps(shape, flat)

    def _prepare(self, flat: FlatBatch) -> Shape:
        shape = Shape(trace_forward(self.job, flat), self._modes())
        self._add_steps(shape, flat)
        return shape

    def _add_steps(self, shape: Shape, flat: FlatBatch) -> None:
        first, steady = self._optimizer_traces(shape.forward)
        steps: list[PreparedStep] = []
        for trace in (first, steady) if first is not None else (steady,):
            graph = join(self.job, shape.forward, trace)
            steps.append(PreparedStep(graph, compile_step(graph), trace))
            steps[-1].compiled.inbox = None if self.mailbox is None else self.mailbox.inbox
            self.draws = self.draws or any(map(draws_on_host, graph.nodes))
        self._profile(steps, flat)
        shape.first = steps[0] if len(steps) == 2 else None
        shape.steady = steps[-1]
        self._note_final_size(first, steps)

    def _optimizer_traces(
        self, forward: ForwardTrace
    ) -> tuple[OptimizerTrace | None, OptimizerTrace | None]:
        """The first step's trace (None where the state exists) and the steady one."""
        if self.opaque_optimizer is not None:
            return None, None
        try:
            return self.traces.of(self.job, forward)
        except NotCapturableError as error:
            name = type(self.job.optimizer).__name__
            self.opaque_optimizer = f"{name} cannot be captured exactly: {error}"
            self.notes.append(
                f"the optimizer runs as eager Python, because {self.opaque_optimizer}"
            )
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

    def _measure(self, steps: list[PreparedStep], flat: FlatBatch) -> list[Profile]:
        """Runs the steps in turn on scratch copies of all that they write to."""
        scratch = Scratch(self.device)
        profiles: list[Profile] = []
        tensors = dict(self.persistent)
        host, device = self.generators
        generators = (copy_generator(host), None if device is None else copy_generator(device))
        names = {m for step in steps for m in step.graph.mutated}
        written = [tensors[m] for m in names if m in tensors]
        written += [t for step in steps for t in step.graph.constants]
        try:
            with scratch.copies_of(written):
                batch = scratch.batch(flat.tensors)
                for step in steps:
                    self._bind_constants(step, tensors)
                    profiles.append(
                        scratch.measure(
                            step.compiled,
                            tensors,
                            batch,
                            generators,
                            self.registers(step),
                            name=self.job.name,
                            repeatable=not step.creates_state,
                        )
                    )
                    for key, slot in step.compiled.outputs.items():
                        tensors[Input("state", key)] = step.compiled.tape.slot(slot)
                for step in steps:
                    step.compiled.unbind()
                tensors.clear()
                batch.clear()
        finally:
            scratch.close()
        return profiles

    def _bind_constants(self, step: PreparedStep, tensors: dict[Input, torch.Tensor]) -> None:
        for index, tensor in enumerate(step.graph.constants):
            tensors[Input("constant", index)] = tensor

    def registers(self, step: PreparedStep) -> dict[int, float]:
        """Values of the step's live hyperparameters, by register."""
        values: Mapping[HyperKey, Any] = hyperparameters(self.job.optimizer)
        return {register: values[key] for key, register in step.compiled.registers.items()}  # type: ignore[index]

    def bind(self, step: PreparedStep) -> None:
        """Gives the step its persistent tensors and the job's random streams."""
        tensors = dict(self.persistent)
        self._bind_constants(step, tensors)
        step.compiled.bind(tensors)
        step.compiled.tape.set_generators(*self.generators)


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
