"""Profiles a compiled step by running it once on scratch copies, under the arena's log.

Fake tensors tell which tensors a step makes; only the run tells what kernels take besides
(workspaces, reordered weights) and how long each takes. The job's tensors are swapped for copies
meanwhile, so nothing that it owns changes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from waterflow.allocator_ext import _C
from waterflow.executor.residence import unique_storages
from waterflow.executor.tape import CompiledStep
from waterflow.partitioner.graph import Input
from waterflow.partitioner.profile import EVENT, Profile

#: A step that takes longer than this is profiled by a single run.
_WARM_UP_LIMIT_SECONDS = 2.0


class Scratch:
    """A private arena, larger than any step, whose pages cost nothing until they are used."""

    def __init__(self) -> None:
        _C.install_lane_allocator()
        self.arena = _largest_arena()
        _C.register_arena(self.arena)

    def close(self) -> None:
        """Gives the memory back once its last tensor is gone."""
        _C.retire_arena(self.arena)

    @contextlib.contextmanager
    def copies_of(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, these tensors have copies of their bytes; afterwards their own bytes again."""
        swapped = [
            (tensor, _C.swap_for_copy(tensor, self.arena, 0))
            for tensor in unique_storages(tensors).values()
        ]
        try:
            yield
        finally:
            for tensor, former in swapped:
                _C.restore(tensor, former)

    def measure(
        self,
        step: CompiledStep,
        tensors: Mapping[Input, torch.Tensor],
        batch: Sequence[torch.Tensor],
        generator: torch.Generator,
        registers: Mapping[int, float],
        *,
        name: str,
        repeatable: bool,
    ) -> Profile:
        """Runs the step and returns what it did; its outputs stay in its slots.

        Args:
            step: the compiled step.
            tensors: its persistent inputs.
            batch: its batch tensors.
            generator: a scratch random generator.
            registers: values of its live hyperparameters.
            name: the job's name.
            repeatable: whether it may run twice, the first time to warm up.
        """
        tape = step.tape
        step.bind(tensors)
        tape.set_batch(list(batch))
        tape.set_generator(generator)
        for register, value in registers.items():
            tape.set_register(register, value)
        started = time.perf_counter()
        profile = self._run_logged(tape, name)
        if repeatable and time.perf_counter() - started < _WARM_UP_LIMIT_SECONDS:
            profile = self._run_logged(tape, name)
        return profile

    def _run_logged(self, tape: Any, name: str) -> Profile:
        seconds = np.zeros(len(tape))
        self.arena.synchronize()
        self.arena.record(True)
        self.arena.take_log()
        logs = []
        try:
            with _C.LaneScope(self.arena, 0, 0):
                for index in range(len(tape)):
                    started = time.perf_counter()
                    tape.run(index, index + 1)
                    seconds[index] = time.perf_counter() - started
                    logs.append(self.arena.take_log())
        finally:
            self.arena.record(False)
            self.arena.take_log()
        return Profile(_events(logs), seconds, 0, "measured", name)


_ALLOCATE, _FREE = 0, 2


def _events(logs: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The arena's log as a profile's events: offsets become block numbers."""
    blocks: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    count = 0
    for node, log in enumerate(logs):
        for event in log:
            offset, size, kind = int(event["offset"]), int(event["bytes"]), int(event["kind"])
            if kind == _ALLOCATE:
                blocks[offset] = count
                rows.append((node, size, count))
                count += 1
            elif kind == _FREE and offset in blocks:
                rows.append((node, -size, blocks.pop(offset)))
    return np.array(rows, dtype=EVENT)


def _largest_arena() -> Any:
    size = 1 << 42
    while True:
        try:
            return _C.Arena.host(size, 1)
        except RuntimeError:
            if size <= 1 << 30:
                raise
            size //= 2
