"""Which storages a compiled step uses when: seen in a run on scratch copies, under the arena's log.

Whatever a schema says of aliases, tensors over one storage are one value here, because they were
seen to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow.executor.device.storages import rounded, storage_key
from waterflow.executor.run.instructions import (
    CallOperator,
    LoweredStep,
    slots_read,
    slots_written,
)
from waterflow.executor.run.step_use import StepUse
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.graph.effects import writes
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.spill import MovableValue

#: Persistent inputs that may be away between steps; a constant may be somebody else's, too.
_MOVABLE_KINDS = ("parameter", "buffer", "state")
_ALLOCATE, _FREE = 0, 2
_FOR_EVER = 1 << 60


@dataclass(eq=False)
class _Seen:
    """A storage as far as it was seen."""

    key: int
    size: int
    block: int | None = None
    inputs: list[Input] = field(default_factory=list)
    uses: dict[int, None] = field(default_factory=dict)
    writes: set[int] = field(default_factory=set)
    opened: dict[int, int] = field(default_factory=dict)
    lives: list[tuple[int, int, int]] = field(default_factory=list)
    movable: bool = False


class UseWatch:
    """Looks at a bound step before and after each instruction of one run."""

    def __init__(
        self, step: CompiledStep, arena: Any, device: torch.device, alignment: int
    ) -> None:
        """Takes the step, bound to its tensors, and the arena that it runs in."""
        self._tape = step.tape
        self._lowered: LoweredStep = step.lowered
        self._arena = arena
        self._device = device
        self._alignment = alignment
        self._of_slot: dict[int, _Seen] = {}
        self._of_storage: dict[int, _Seen] = {}
        self._all: list[_Seen] = []
        self._blocks: dict[int, int] = {}
        self._count = 0
        self._arguments: list[_Seen] = []
        self._find_persistent()

    def _find_persistent(self) -> None:
        for meaning, slot in self._lowered.inputs.items():
            tensor = self._tape.slot(slot)
            seen = self._seen(slot, tensor)
            if not seen.inputs:
                seen.movable = bool(seen.size) and tensor.device == self._device
            seen.inputs.append(meaning)
            seen.movable = seen.movable and meaning.kind in _MOVABLE_KINDS
        for node in self._lowered.views:
            slot = self._lowered.slots[node]
            self._seen(slot, self._tape.slot(slot))

    def _seen(self, slot: int, tensor: torch.Tensor) -> _Seen:
        key = storage_key(tensor)
        if key not in self._of_storage:
            size = rounded(tensor.untyped_storage().nbytes(), self._alignment)
            self._of_storage[key] = _Seen(key, size)
            self._all.append(self._of_storage[key])
        self._of_slot[slot] = self._of_storage[key]
        return self._of_storage[key]

    def before(self, index: int) -> None:
        """An instruction is about to run."""
        read = slots_read(self._lowered.instructions[index])
        self._arguments = [self._of_slot[slot] for slot in read if slot in self._of_slot]

    def after(self, index: int, log: Any) -> None:
        """An instruction has run; `log` is what the arena has done for it."""
        self._follow(log)
        instruction = self._lowered.instructions[index]
        made = [self._result(index, slot) for slot in slots_written(instruction)]
        if not (isinstance(instruction, CallOperator) and instruction.node.target.is_view):  # type: ignore[union-attr]
            written = {self._lowered.slots.get(node) for node in writes(instruction.node)}
            for seen in (*self._arguments, *filter(None, made)):
                seen.uses[index] = None
            for slot in written & self._of_slot.keys():
                self._of_slot[slot].writes.add(index)  # type: ignore[index]
        for slot in instruction.release:
            self._let_go(index, slot)

    def _result(self, index: int, slot: int) -> _Seen | None:
        tensor = self._tape.slot(slot)
        if tensor is None:
            return None
        is_new = storage_key(tensor) not in self._of_storage
        seen = self._seen(slot, tensor)
        seen.opened[slot] = index
        if is_new:
            pointer = tensor.untyped_storage().data_ptr() if seen.size else 0
            if seen.size and self._arena.owns(pointer):
                seen.block = self._blocks.get(int(self._arena.offset_of(pointer)))
            seen.movable = seen.block is not None
            seen.uses[index] = None
            seen.writes.add(index)
        return seen

    def _let_go(self, index: int, slot: int) -> None:
        seen = self._of_slot.pop(slot, None)
        if seen is None or slot not in seen.opened:
            return
        seen.lives.append((seen.opened.pop(slot), slot, index))
        if not seen.opened and not seen.inputs:
            del self._of_storage[seen.key]

    def _follow(self, log: Any) -> None:
        for event in log:
            offset, kind = int(event["offset"]), int(event["kind"])
            if kind == _ALLOCATE:
                self._blocks[offset] = self._count
                self._count += 1
            elif kind == _FREE:
                self._blocks.pop(offset, None)

    def result(self, profile: Profile) -> StepUse:
        """What was seen in the run that has this profile."""
        survivors = set(self._blocks.values())
        values: list[MovableValue] = []
        inputs: dict[int, tuple[Input, ...]] = {}
        lives: dict[int, list[tuple[int, int, int]]] = {}
        for seen in self._all:
            if not seen.movable or not seen.uses or seen.block in survivors:
                continue
            number = len(values)
            uses = tuple(sorted(seen.uses))
            values.append(MovableValue(seen.size, uses, frozenset(seen.writes), seen.block))
            if seen.inputs:
                inputs[number] = tuple(seen.inputs)
            else:
                lives[number] = [*seen.lives, *((a, s, _FOR_EVER) for s, a in seen.opened.items())]
        return StepUse(profile, values, inputs, lives)
