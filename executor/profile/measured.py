"""Profiles a compiled step by running it once on scratch copies, under the arena's log.

Fake tensors tell which tensors a step makes; only the run tells what kernels take besides
(workspaces, reordered weights) and how long each takes. The step is bound to copies of what it
writes, so nothing that the job owns changes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device.base import Device
from waterflow.executor.device.storages import over, span_of, storage_key, unique_storages
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import EVENT, Profile

Key = TypeVar("Key", bound=Hashable)

#: A step that takes longer than this is profiled by a single run.
_WARM_UP_LIMIT_SECONDS = 2.0


class Watch(Protocol):
    """Looks at a step beside its run."""

    def before(self, index: int) -> None:
        """An instruction is about to run."""

    def after(self, index: int, log: Any) -> None:
        """An instruction has run; `log` is what the arena has done for it."""


class Scratch:
    """A private arena, larger than any step, beside the budget."""

    def __init__(self, device: Device) -> None:
        _C.install_lane_allocator()
        self._device = device
        self.arena, self._clock = device.scratch()
        _C.register_arena(self.arena)

    def close(self) -> None:
        """Gives the memory back once its last tensor is gone; what is queued is done first."""
        try:
            self.arena.finish()
        finally:
            _C.retire_arena(self.arena)

    def twins(
        self, tensors: Mapping[Key, torch.Tensor], written: Collection[Key]
    ) -> dict[Key, torch.Tensor]:
        """The same tensors over copies of those storages that a step writes to.

        Views of one storage are views of one copy; what is only read is used as it is.

        Args:
            tensors: a step's tensors.
            written: which of them it writes to.
        """
        storages = unique_storages(tensors[key] for key in written)
        copies = {key: self._copy(tensor) for key, tensor in storages.items()}
        return {
            key: over(tensor, copies[storage_key(tensor)])
            if storage_key(tensor) in copies
            else tensor
            for key, tensor in tensors.items()
        }

    def _copy(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        if tensor.device == self._device.tensors:
            return _C.copy_in_arena(tensor, self.arena, 0).untyped_storage()
        return tensor.untyped_storage().clone()  # a number kept on the host beside a device's model

    def batch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A batch where the step expects it, in this arena if it has to be brought there; a device
        has it packed and aligned."""
        with _C.LaneScope(self.arena, 0, 0):
            here = [_on(tensor, self._device.tensors) for tensor in tensors]
        return list(map(_aligned, here)) if self._device.queues else here

    def bind(
        self,
        step: CompiledStep,
        tensors: Mapping[Input, torch.Tensor],
        batch: Sequence[torch.Tensor],
        generators: tuple[torch.Generator, torch.Generator | None],
        registers: Mapping[int, float],
    ) -> None:
        """Gives a step all that it reads, before `run` or `measure`.

        Args:
            step: the compiled step.
            tensors: its persistent inputs.
            batch: its batch tensors, on the device.
            generators: scratch random streams of the host and of the device.
            registers: values of its live hyperparameters.
        """
        step.bind(tensors)
        step.tape.set_batch(list(batch))
        step.tape.set_generators(*generators)
        for register, value in registers.items():
            step.tape.set_register(register, value)

    def run(self, step: CompiledStep) -> float:
        """Runs a bound step once and returns its loss; its outputs stay in its slots."""
        self.arena.synchronize()
        with _C.LaneScope(self.arena, 0, 0):
            step.tape.run(0, len(step.tape))
        self.arena.finish()
        return float(step.tape.loss)

    def measure(
        self, step: CompiledStep, *, name: str, repeatable: bool, watch: Watch | None = None
    ) -> Profile:
        """Runs a bound step and returns what it did; its outputs stay in its slots.

        Args:
            step: the compiled step.
            name: the job's name.
            repeatable: whether it may run twice, the first time to warm up.
            watch: looks at each instruction of one more run, whose profile this is.
        """
        started = time.perf_counter()
        ran = self._run_logged(step.tape)
        if repeatable and time.perf_counter() - started < _WARM_UP_LIMIT_SECONDS:
            ran = self._run_logged(step.tape)
        seconds = ran.seconds
        if watch is not None:
            ran = self._run_logged(step.tape, watch)  # whose times count the watch, too
        return Profile(_events(ran), seconds, 0, "measured", name)

    def _run_logged(self, tape: Any, watch: Watch | None = None) -> _Ran:
        """Runs a tape; in one call where nobody watches, as other threads of Python's are let in at
        each."""
        self.arena.synchronize()
        self.arena.record(True)
        self.arena.take_log()
        where = self.arena, self._clock, 0
        try:
            with _C.LaneScope(self.arena, 0, 0):
                if watch is None:
                    log, ends, marks = tape.run_logged(0, len(tape), *where)
                else:
                    log, ends, marks = _watched(tape, watch, where)
        finally:
            self.arena.record(False)
            self.arena.take_log()
        self._clock.wait(marks[-1])
        seconds = np.diff([self._clock.seconds(mark) for mark in marks])
        return _Ran(log, ends, np.maximum(seconds, 0.0))


class _Ran(NamedTuple):
    """What a tape has done.

    Attributes:
        log: of the arena.
        ends: behind each instruction, how far the log reaches.
        seconds: of each instruction.
    """

    log: np.ndarray[Any, Any]
    ends: Sequence[int]
    seconds: np.ndarray[Any, Any]


def _watched(
    tape: Any, watch: Watch, where: tuple[Any, Any, int]
) -> tuple[np.ndarray[Any, Any], list[int], list[Any]]:
    """The same one by one, each between two looks."""
    logs, ends = [], [0]
    marks: list[Any] = []
    for index in range(len(tape)):
        watch.before(index)
        log, _, (before, after) = tape.run_logged(index, index + 1, *where)
        watch.after(index, log)
        logs.append(log)
        ends.append(ends[-1] + len(log))
        marks += [after] if marks else [before, after]
    return np.concatenate(logs), ends[1:], marks


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is, or a copy that begins where torch begins memory of its own."""
    if not _C.is_skewed(tensor):
        return tensor
    return span_of(tensor).clone().as_strided(tensor.shape, tensor.stride())


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, with the strides that it has."""
    if tensor.device == device:
        return tensor
    span = span_of(tensor).to(device)
    return span.as_strided(tensor.shape, tensor.stride())


_ALLOCATE, _FREE = 0, 2


def _events(ran: _Ran) -> np.ndarray[Any, Any]:
    """The arena's log as a profile's events: offsets become block numbers."""
    blocks: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    count = 0
    nodes = np.searchsorted(ran.ends, np.arange(len(ran.log)), side="right")
    fields = (ran.log[name].tolist() for name in ("offset", "bytes", "kind"))
    for node, offset, size, kind in zip(nodes.tolist(), *fields, strict=True):
        if kind == _ALLOCATE:
            blocks[offset] = count
            rows.append((node, size, count))
            count += 1
        elif kind == _FREE and offset in blocks:
            rows.append((node, -size, blocks.pop(offset)))
    return np.array(rows, dtype=EVENT)
