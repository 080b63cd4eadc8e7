"""Steps prepared to flow: each piled up from one end of a range that two lanes share.

How lanes share a range is in `allocator_ext/core/plan/gate.h`, how a step is piled up in `pile.h`
beside it. Everything that a lane may meet is settled here beforehand, so that no order of events
can make a step run out of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from waterflow.allocator_ext import _C
from waterflow.executor.plan.round_plan import StepMemory
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.groups import NodeGroup, partition_for_flow

HEADROOMS = (0.10, 0.03, 0.01, 0.0)
"""How much higher than the step's live peak its pile may get: the higher, the sooner it falls."""

#: Piles kept of a step: another room is another pile, and rooms change with every job that comes.
_MOST_PILES = 16


@dataclass(frozen=True, eq=False)
class PiledStep:
    """A step with its places, counted from the end of a range, and how far it reaches when.

    Attributes:
        groups: the step's node groups.
        offsets: a place per request, in bytes from the range's end.
        sizes: the requests' bytes.
        demand: the extension's form of how far the pile reaches, group by group.
        extent: how far it reaches at most, in bytes.
    """

    groups: tuple[NodeGroup, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    demand: Any
    extent: int

    def places(self, start: int, stop: int, from_top: bool) -> npt.NDArray[np.int64]:
        """The offsets in an arena whose bytes from `start` to `stop` are the range."""
        return stop - self.offsets - self.sizes if from_top else start + self.offsets


def pile_step(memory: StepMemory, headroom: float, room: int) -> PiledStep:
    """Piles a step up, at most `headroom` of its peak higher than that if such a pile is found.

    It is lower where there is only `room` bytes. With a headroom of 0.0 the result is the lowest
    that is known, so it fits wherever the step does.

    Raises ValueError where blocks outlive the step.
    """
    profile = memory.profile
    if profile.surviving_bytes:
        raise ValueError(f"step {profile.name!r}: blocks that outlive it cannot be piled up")
    sizes, ids = memory.events
    peak = profile.transient_peak_bytes
    pile = _C.pile_up(sizes, ids, min(int(peak * (1 + headroom)), room))
    offsets, reach = pile.offsets, pile.reach
    if headroom == 0.0 and memory.extent < pile.extent:
        offsets = memory.solo_offsets
        reach = _C.reach_of(sizes, ids, offsets.tolist())
    groups = partition_for_flow(profile)
    demand = _demand(memory, groups, np.asarray(reach, dtype=np.int64))
    return PiledStep(groups, np.asarray(offsets, np.int64), sizes[sizes > 0], demand, demand.most)


class Piles:
    """A step piled up for one room after another, remembered."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self._known: dict[tuple[float, int], PiledStep] = {}

    def at(self, headroom: float, room: int) -> PiledStep:
        """The step piled up as `pile_step` does; most rooms are ample and change nothing."""
        room = min(room, int(self.memory.profile.transient_peak_bytes * (1 + headroom)))
        if (headroom, room) not in self._known:
            if len(self._known) >= _MOST_PILES:
                self._known.clear()
            self._known[headroom, room] = pile_step(self.memory, headroom, room)
        return self._known[headroom, room]


def _demand(memory: StepMemory, groups: Sequence[NodeGroup], reach: npt.NDArray[np.int64]) -> Any:
    """`reach` has an entry per event: how far the pile reaches after it."""
    levels = np.concatenate([[0], reach])
    ends = memory.arrays(groups)[2]
    borders = np.concatenate([[0], ends])
    during = [int(levels[a : b + 1].max()) for a, b in itertools.pairwise(borders)]
    return _C.Demand(during, levels[borders].tolist())


Flowing = tuple[int, CompiledStep, StepMemory]
"""A job's number, its compiled step and the step's memory."""


class FlowPlan:
    """All steps of the jobs that flow, ready to run on any lane.

    Attributes:
        gate: admits their groups.
        lanes: how many of the lanes there is memory for.
        version: the arena's (`Arena.version`), for which the plan was made.
    """

    def __init__(self, arena: Any, lanes: int, steps: Sequence[tuple[Flowing, PiledStep]]) -> None:
        """Takes the range above what is live in the arena now.

        Raises ValueError where a step does not fit it.
        """
        self.version = int(arena.version)
        start, stop = int(arena.live_end), int(arena.statistics().capacity)
        tallest = max(piled.extent for _, piled in steps)
        if tallest > stop - start:
            raise ValueError(f"a step of {tallest} bytes does not fit {stop - start}")
        size, self.lanes = divided(stop - start, tallest, lanes)
        size -= size % arena.alignment
        count = (self.lanes + 1) // 2
        self._ranges = [(start + i * size, start + (i + 1) * size) for i in range(count)]
        self.gate = _C.Gate(size, self.lanes)
        # What no pile reaches; a lane by itself piles up from the bottom only.
        between = (start + tallest, start + size - (tallest if self.lanes > 1 else 0))
        self._between = between if between[0] < between[1] else (stop, stop)
        self._arena = arena
        self._piled: Mapping[int, tuple[Flowing, PiledStep]] = {
            id(flowing[1]): (flowing, piled) for flowing, piled in steps
        }
        self._made: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.open()

    def open(self) -> None:
        """Forgets deviations. Only while no step is under way."""
        self._beside = _C.RoundMemory(*self._between)

    @property
    def deviated(self) -> bool:
        """Whether a request since `open` was not as profiled: the allocator judges all since."""
        return bool(self._beside.deviated)

    def has(self, step: CompiledStep) -> bool:
        """Whether the step is part of the plan."""
        return id(step) in self._piled

    def begin(self, step: CompiledStep, lane: int, own_blocks: bool) -> Any:
        """The extension's form of the step on this lane, its memory plan at the start.

        Args:
            step: one of the plan's.
            lane: where it is about to run.
            own_blocks: it keeps its blocks itself; see `RoundPlan.begin`.

        Raises:
            StalePlan: it keeps its blocks, and a place of the plan is not free any more.
        """
        key = (id(step), lane)
        if key not in self._made:
            self._made[key] = self._make(*self._piled[id(step)], lane)
        memory_plan, flow_step = self._made[key]
        job = self._piled[id(step)][0][0]
        _C.begin_plans(self._arena, [(memory_plan, job)], self._beside, own_blocks)
        return flow_step

    def _make(self, flowing: Flowing, piled: PiledStep, lane: int) -> tuple[Any, Any]:
        job, step, memory = flowing
        start, stop = self._ranges[lane // 2]
        places = piled.places(start, stop, from_top=lane % 2 == 1)
        memory_plan = memory.memory_plan(places, self.version)
        groups = [(group.start, group.stop) for group in piled.groups]
        return memory_plan, _C.FlowStep(
            (step.tape, memory_plan, job, step.inbox), groups, piled.demand
        )

    @property
    def deviations(self) -> int:
        """Requests so far that were not as profiled."""
        return sum(memory_plan.deviations for memory_plan, _ in self._made.values())


def num_ranges(size: int, tallest: int, lanes: int) -> int:
    """How many ranges of `size` bytes in all serve the lanes, two at most each, one at least."""
    pairs = (lanes + 1) // 2
    return max(1, min(pairs, size // tallest if tallest else pairs))


def divided(size: int, tallest: int, lanes: int) -> tuple[int, int]:
    """The bytes of each range, and how many of the lanes they serve; see `num_ranges`."""
    count = num_ranges(size, tallest, lanes)
    return size // count, min(lanes, 2 * count)


def most_together(steps: Sequence[PiledStep], size: int, lanes: int) -> int:
    """The most that the piles of these steps reach together, in any order that a gate allows.

    Args:
        steps: one per job.
        size: bytes of all ranges together.
        lanes: how many lanes there are.
    """
    alone = max(step.extent for step in steps)
    each, lanes = divided(size, alone, lanes)
    pairs = {(a.demand, b.demand) for a, b in itertools.combinations(steps, 2)}
    both = max((_C.most_together(a, b, each) for a, b in pairs), default=alone)
    return min(size, lanes // 2 * both + lanes % 2 * alone)
