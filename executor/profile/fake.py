"""The profile of a step that has not run: what its fake tensors tell.

Fake tensors know which storages every instruction of the tape makes, how large they are, and which
die with the slots that it releases. They do not know what kernels ask for besides their results.
`cpu_workspaces` knows it of the common kernels on the host; where a step has no others, its profile
is equal to the measured one, event for event. It does not of others (oneDNN's convolutions and
recurrent layers reorder their weights and inputs; a GPU's kernels have workspaces), so there this
profile is what a step needs at least, and `measure` finds the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from waterflow.executor.device.storages import rounded, storage_key
from waterflow.executor.profile.costs import flops, moved_bytes
from waterflow.executor.profile.cpu_workspaces import Script, host_script
from waterflow.executor.run.instructions import (
    CallOperator,
    Instruction,
    Load,
    holders_of,
    lower_step,
)
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.graph.step_graph import StepGraph, tensors_of
from waterflow.partitioner.profile import EVENT, IntArray, Profile

#: Results that are their first argument in another shape, though their schemas do not say so.
_UNDECLARED_VIEWS = {torch.ops.aten._unsafe_view.default}

#: Stands for memory that the step neither makes nor frees: persistent, empty, on another device.
_OUTSIDE = -1

#: The block of a value, None of one that is no tensor; of several, a list of such.
_Blocks = Any


@dataclass(frozen=True, eq=False)
class StepWalk:
    """What a step does to memory, instruction by instruction, in bytes that are not yet rounded.

    Attributes:
        operators: an operator's name per instruction.
        boundary: first instruction of the backward pass, None if there is none.
        event_nodes: int32, the instruction of each event; never decreases.
        event_blocks: int32, its block; blocks count up from 0 in the order of allocation.
        allocates: bool, whether it allocates the block or frees it.
        sizes: int64, bytes of each block.
        flops: int64, arithmetic operations of each instruction.
        moved_bytes: int64, bytes that each instruction reads and writes.
    """

    operators: tuple[str, ...]
    boundary: int | None
    event_nodes: npt.NDArray[np.int32]
    event_blocks: npt.NDArray[np.int32]
    allocates: npt.NDArray[np.bool_]
    sizes: IntArray
    flops: IntArray
    moved_bytes: IntArray

    def profile(self, alignment: int, name: str) -> Profile:
        """The profile, as an arena of this alignment would count; times are unknown.

        Args:
            alignment: bytes that the arena rounds up to.
            name: of the job.
        """
        sizes = rounded(self.sizes, alignment)  # type: ignore[arg-type]  # works on arrays as well
        events = np.empty(len(self.event_nodes), dtype=EVENT)
        events["node"], events["id"] = self.event_nodes, self.event_blocks
        events["bytes"] = np.where(self.allocates, 1, -1) * np.asarray(sizes)[self.event_blocks]
        return Profile(events, np.zeros(len(self.operators)), 0, "fake", name)


def fake_profile(
    step: StepGraph,
    compiled: CompiledStep | None = None,
    *,
    alignment: int,
    name: str,
    threads: int = 1,
) -> Profile:
    """The profile of a captured step that has not run.

    It has an entry for every instruction of the step's tape, as a measured one has. Memory of
    persistent inputs is not in it, the batch's is: the step begins by copying it.

    Args:
        step: the step graph.
        compiled: its tape, to compare with where it is there.
        alignment: bytes that the arena rounds up to.
        name: of the job.
        threads: intra-op threads of its lane; a few kernels take memory for each.

    Raises:
        AssertionError: the tape given is not that of the step.
    """
    walk = walk_step(step, threads)
    if compiled is not None and list(walk.operators) != compiled.names:
        raise AssertionError(f"job {name!r}: the tape is not that of the step graph")
    return walk.profile(alignment, name)


def walk_step(step: StepGraph, threads: int = 1) -> StepWalk:
    """Follows a step's instructions without running them, on a lane of so many threads."""
    return _Walker(step, threads).run()


class _Walker:
    def __init__(self, step: StepGraph, threads: int) -> None:
        self.lowered = lower_step(step)
        self.node_of_slot = {slot: node for node, slot in self.lowered.slots.items()}
        self.threads = threads
        self.device = next(tensors_of(step.loss)).device
        self.blocks: dict[fx.Node, _Blocks] = {}
        self.holders: list[int] = []  # how many slots hold each block
        self.sizes: list[int] = []
        self.events: list[tuple[int, int, bool]] = []
        self.instruction = 0
        for meaning, node in step.inputs.items():
            if meaning.kind != "batch":
                self.blocks[node] = _OUTSIDE
        for node in self.lowered.views:
            self.blocks[node] = _OUTSIDE

    def run(self) -> StepWalk:
        costs: list[tuple[int, int]] = []
        for index, instruction in enumerate(self.lowered.instructions):
            self.instruction = index
            costs.append(self._follow(instruction))
            for slot in instruction.release:
                self._let_go(self.blocks[self.node_of_slot[slot]])
        return self._result(np.array(costs, dtype=np.int64).reshape(-1, 2))

    def _result(self, costs: IntArray) -> StepWalk:
        nodes, blocks, allocates = zip(*self.events, strict=True) if self.events else ((), (), ())
        return StepWalk(
            operators=tuple(instruction.name for instruction in self.lowered.instructions),
            boundary=self.lowered.boundary,
            event_nodes=np.array(nodes, dtype=np.int32),
            event_blocks=np.array(blocks, dtype=np.int32),
            allocates=np.array(allocates, dtype=np.bool_),
            sizes=np.array(self.sizes, dtype=np.int64),
            flops=costs[:, 0].copy(),
            moved_bytes=costs[:, 1].copy(),
        )

    # Instructions

    def _follow(self, instruction: Instruction) -> tuple[int, int]:
        """Allocates and frees as the instruction does; returns operations and bytes moved."""
        node = instruction.node
        if isinstance(instruction, Load):
            return 0, self._load(node)
        if isinstance(instruction, CallOperator):
            self._operator(node)
            return flops(node), moved_bytes(node)
        return 0, 0  # reads a number, or computes with numbers

    def _load(self, node: fx.Node) -> int:
        """A batch tensor is copied with the span that its strides cover; returns bytes moved."""
        (tensor,) = tensors_of(node)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
        size: int = span * tensor.element_size()
        here = size > 0 and tensor.device == self.device
        self.blocks[node] = self._allocate(size) if here else _OUTSIDE
        self._hold(self.blocks[node])
        return 2 * size

    def _operator(self, node: fx.Node) -> None:
        fresh: list[int] = []
        results = self._results(node, fresh)
        made = self._run_kernel(node, fresh)
        self.blocks[node] = _renumbered(results, made)
        for holder in holders_of(node):
            self._find_blocks(holder)
            if holder in self.lowered.slots:
                self._hold(self.blocks[holder])
        for block in made:
            if block != _OUTSIDE and self.holders[block] == 0:  # a result that nobody reads
                self._free(block)

    def _run_kernel(self, node: fx.Node, fresh: Sequence[int]) -> list[int]:
        """Allocates what a kernel takes; returns the blocks of its new results."""
        made = [_OUTSIDE] * len(fresh)
        taken: list[int] = []
        for kind, value in self._script(node, len(fresh)):
            if kind == "result":
                made[value] = self._allocate(fresh[value])
            elif kind == "take":
                taken.append(self._allocate(value) if value else _OUTSIDE)
            elif taken[value] != _OUTSIDE:
                self._free(taken[value])
        return made

    def _script(self, node: fx.Node, results: int) -> Script:
        if self.device.type == "cpu":
            return host_script(node, results, self.threads)
        return [("result", place) for place in range(results)]

    def _results(self, node: fx.Node, fresh: list[int]) -> _Blocks:
        """The blocks of a node's results; of new ones the sizes go to `fresh`, their place here."""
        value = node.meta.get("val")
        known = {key: block for source in node.all_input_nodes for key, block in self._keys(source)}
        declared = list(_declared_aliases(node))
        if not isinstance(value, (list, tuple)):
            return self._block_of(value, known, declared[0] if declared else None, fresh)
        if len(declared) == 1:
            declared = declared * len(value)
        pairs = zip(value, declared, strict=True)
        return [self._block_of(item, known, alias, fresh) for item, alias in pairs]

    def _block_of(
        self, value: Any, known: dict[int, int], alias: fx.Node | None, fresh: list[int]
    ) -> _Blocks:
        if isinstance(value, (list, tuple)):
            return [self._block_of(item, known, alias, fresh) for item in value]
        if not isinstance(value, torch.Tensor):
            return None
        if value.device != self.device:
            return _OUTSIDE
        key = storage_key(value)
        if key not in known:
            # Schemas say the rest: the optimizer, traced apart, has twins of the gradients.
            block = self.blocks[alias] if alias is not None else None
            if not isinstance(block, int):
                block = _place(value.untyped_storage().nbytes(), fresh)
            known[key] = block
        return known[key]

    def _keys(self, node: fx.Node) -> Iterator[tuple[int, int]]:
        blocks = list(_leaves(self.blocks.get(node, _OUTSIDE)))
        tensors = list(tensors_of(node))
        if len(blocks) == len(tensors):
            yield from zip(map(storage_key, tensors), blocks, strict=True)

    def _find_blocks(self, node: fx.Node) -> None:
        """Of a node that takes a part of a result."""
        if node not in self.blocks:
            source, place = node.args
            assert isinstance(source, fx.Node)
            self._find_blocks(source)
            self.blocks[node] = self.blocks[source][place]

    # Blocks

    def _allocate(self, size: int) -> int:
        self.events.append((self.instruction, len(self.sizes), True))
        self.sizes.append(size)
        self.holders.append(0)
        return len(self.sizes) - 1

    def _hold(self, block: _Blocks) -> None:
        if block is not None and block != _OUTSIDE:
            self.holders[block] += 1

    def _let_go(self, block: _Blocks) -> None:
        if block is not None and block != _OUTSIDE:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self._free(block)

    def _free(self, block: int) -> None:
        self.events.append((self.instruction, block, False))


def _place(size: int, fresh: list[int]) -> int:
    """Stands for a block that is yet to be allocated: below all others."""
    if size == 0:
        return _OUTSIDE
    fresh.append(size)
    return _OUTSIDE - len(fresh)


def _renumbered(blocks: _Blocks, made: Sequence[int]) -> _Blocks:
    """The blocks with those that `_place` stood for."""
    if isinstance(blocks, list):
        return [_renumbered(item, made) for item in blocks]
    if blocks is not None and blocks < _OUTSIDE:
        return made[_OUTSIDE - blocks - 1]
    return blocks


def _leaves(blocks: _Blocks) -> Iterator[int]:
    if isinstance(blocks, list):
        for item in blocks:
            yield from _leaves(item)
    elif blocks is not None:
        yield blocks


def _declared_aliases(node: fx.Node) -> Sequence[fx.Node | None]:
    """Per return of an operator the argument whose memory it certainly is, None if it is new."""
    places = _alias_places(node.target)
    given = [node.args[p] if p is not None and p < len(node.args) else None for p in places]
    return [source if isinstance(source, fx.Node) else None for source in given]


@functools.cache
def _alias_places(target: Any) -> list[int | None]:
    schema = target._schema
    if target in _UNDECLARED_VIEWS:
        return [0]
    certain = schema.is_mutable or target.is_view
    found: list[int | None] = []
    for result in schema.returns:
        sets = result.alias_info.before_set if certain and result.alias_info else set()
        same = (
            place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.before_set & sets
        )
        found.append(next(same, None))
    return found
