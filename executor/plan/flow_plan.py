"""How memory is shared by jobs that flow: ranges, each with two lanes that pile up from its ends.

How two lanes share a range is in `allocator_ext/core/plan/gate.h`. Everything that a lane may meet
is settled here beforehand, so that no order of events can make a step run out of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from waterflow.allocator_ext import _C
from waterflow.executor.plan.piled_step import PiledStep
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.tape import CompiledStep


class Flowing(NamedTuple):
    """A job's number, its compiled step, the step's memory, and what holds the job back."""

    job: int
    step: CompiledStep
    memory: StepMemory
    throttle: Any = None


class FlowPlan:
    """All steps of the jobs that flow, ready to run on any lane.

    Attributes:
        gate: admits their groups.
        lanes: how many of the lanes there is memory for.
        version: the arena's (`Arena.version`), for which the plan was made.
        is_over: whether it has no step any more, as memory that it counts on is given to others.
    """

    def __init__(self, arena: Any, lanes: int, steps: Sequence[tuple[Flowing, PiledStep]]) -> None:
        """Takes the range above what is live in the arena now.

        Raises ValueError where a step does not fit it.
        """
        self.is_over = False
        self.version = int(arena.version)
        start, stop = int(arena.live_end), int(arena.statistics().capacity)
        tallest = max(piled.extent for _, piled in steps)
        if tallest > stop - start:
            raise ValueError(f"a step of {tallest} bytes does not fit {stop - start}")
        size, self.lanes = divided(stop - start, tallest, lanes)
        size -= size % arena.alignment
        self._is_roomy = self.lanes == 1 or 2 * tallest <= size  # nobody ever waits for memory
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

    def end(self) -> None:
        """No step begins any more. Only while none is under way."""
        self.is_over = True

    @property
    def deviated(self) -> bool:
        """Whether a request since `open` was not as profiled: the allocator judges all since."""
        return bool(self._beside.deviated)

    def has(self, step: CompiledStep) -> bool:
        """Whether the step is part of the plan."""
        return not self.is_over and id(step) in self._piled

    def begin(self, step: CompiledStep, lane: int, own_blocks: bool) -> Any:
        """The extension's form of the step on this lane, its memory plan at the start.

        Args:
            step: one of the plan's.
            lane: where it is about to run.
            own_blocks: it keeps its blocks itself; see `RoundPlan.begin`.

        Raises:
            StalePlan: it keeps its blocks, and a place of the plan is not free any more.
        """
        memory_plan, flow_step = self._form(step, lane)
        job = self._piled[id(step)][0][0]
        _C.begin_plans(self._arena, [(memory_plan, job)], self._beside, own_blocks, lane)
        return flow_step

    @property
    def beside(self) -> Any:
        """What the steps under way share, in the extension's form."""
        return self._beside

    def form_of(self, step: CompiledStep, lane: int) -> Any:
        """The extension's form of one of the plan's steps on this lane, wherever its memory plan
        stands: trains put it at its start."""
        return self._form(step, lane)[1]

    def _form(self, step: CompiledStep, lane: int) -> tuple[Any, Any]:
        key = (id(step), lane)
        if key not in self._made:
            self._made[key] = self._make(*self._piled[id(step)], lane)
        return self._made[key]

    def _make(self, flowing: Flowing, piled: PiledStep, lane: int) -> tuple[Any, Any]:
        job, step, memory, throttle = flowing
        start, stop = self._ranges[lane // 2]
        places = piled.places(start, stop, from_top=lane % 2 == 1)
        memory_plan = memory.memory_plan(places, self.version)
        groups = [(group.start, group.stop) for group in piled.groups]
        demand = piled.demand
        if self._is_roomy:  # nobody waits for what the step lets go of: it is admitted as a whole
            groups, demand = [(0, memory.profile.num_nodes)], _C.Demand([piled.extent], [0, 0])
        form = step.tape, memory_plan, job, step.device_input
        seconds = [float(memory.profile.node_seconds[a:b].sum()) for a, b in groups]
        return memory_plan, _C.FlowStep(form, groups, demand, seconds, throttle)

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
