"""Steps piled up from one end of a range of memory, and how far they reach when.

How a pile is built is in `allocator_ext/core/plan/pile.h`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from waterflow.allocator_ext import _C
from waterflow.executor.plan.step_memory import StepMemory
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
