"""A step lowered under a spill plan: its instructions with the moves between them; its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waterflow.allocator_ext import _C
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.instructions import Instruction, LoweredStep, MoveStorage
from waterflow.executor.run.step_use import StepUse
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.spill import (
    CopyCost,
    LimitTooSmallError,
    MovableValue,
    SpillPlan,
    plan_spill,
    spill_everything,
    tightest_place,
)
from waterflow.partitioner.spilled import End, Move, Node, homes_of, sequence_of, spilled_profile

_ENDS = {
    End.LEAVE: _C.MoveEnd.LEAVE,
    End.GONE: _C.MoveEnd.GONE,
    End.FETCH: _C.MoveEnd.FETCH,
    End.BACK: _C.MoveEnd.BACK,
}
#: Addresses need a little more than what is live at most: so often the step is planned tighter.
_MOST_TRIES = 12
#: Where that comes to nothing, targets between the limit and the least that are tried.
_SHARES = 8


@dataclass(frozen=True, eq=False)
class SpilledStep:
    """A step under a spill plan.

    Attributes:
        plan: the plan.
        lowered: its instructions.
        memory: what it does to memory now; the persistent values that are away are transient.
        away: the persistent values that are away between steps, with the inputs over each.
        away_bytes: what they take.
        tier_bytes: what the tier has to hold.
        moved_bytes: what a step copies, both ways.
    """

    plan: SpillPlan
    lowered: LoweredStep
    memory: StepMemory
    away: Mapping[int, tuple[Input, ...]]
    away_bytes: int
    tier_bytes: int
    moved_bytes: int

    def needs(self, persistent_bytes: int) -> int:
        """What a job needs that takes this step alone, gaps between addresses included.

        Args:
            persistent_bytes: all that it holds between steps, what is away included.
        """
        return persistent_bytes - self.away_bytes + self.memory.extent


def spill_step(
    lowered: LoweredStep,
    use: StepUse,
    persistent_bytes: int,
    limit: int,
    *,
    alignment: int,
    required: frozenset[Input] = frozenset(),
    cost: CopyCost | None = None,
) -> SpilledStep:
    """Plans and lowers a step so that the job, taking it alone, needs no more than `limit` bytes.

    Args:
        lowered: the step.
        use: what it uses when.
        persistent_bytes: all that the job holds between steps.
        limit: bytes, gaps between addresses included.
        alignment: bytes to which the arena rounds.
        required: inputs that are away between steps in any case.
        cost: what copies take.

    Raises:
        LimitTooSmallError: there is no such plan; one for the limit that it names there is.
    """
    profile = use.profile.beside(persistent_bytes=persistent_bytes)
    forced = [n for n, meanings in use.inputs.items() if not required.isdisjoint(meanings)]

    def planned(target: int) -> SpilledStep | None:
        try:
            plan = plan_spill(profile, use.values, target, cost=cost, required=forced)
        except LimitTooSmallError:
            return None
        return lower_spilled(lowered, use, plan, alignment)

    target = limit
    for _ in range(_MOST_TRIES):
        spilled = planned(target)
        if spilled is None:
            break
        excess = spilled.needs(persistent_bytes) - limit
        if excess <= 0:
            return spilled
        target -= max(excess, alignment)
    tightest = spill_all(lowered, use, persistent_bytes, alignment=alignment)
    least, node = tightest_place(profile, use.values)
    if tightest.needs(persistent_bytes) > limit:
        raise LimitTooSmallError(limit, tightest.needs(persistent_bytes), node)
    # Where few large values leave large gaps, what is over the limit tells little of what fits.
    for share in range(1, _SHARES):
        spilled = planned(limit - (limit - least) * share // _SHARES)
        if spilled is not None and spilled.needs(persistent_bytes) <= limit:
            return spilled
    return tightest


def spill_all(
    lowered: LoweredStep, use: StepUse, persistent_bytes: int, *, alignment: int
) -> SpilledStep:
    """The step with every value away whenever it is not used, each copy waited for: the smallest
    memory that spilling can give, and what a plan is compared with.

    It depends on no measured time and on nothing that other steps put away, so a limit that allows
    it is enough whenever it is asked for.
    """
    profile = use.profile.beside(persistent_bytes=persistent_bytes)
    return lower_spilled(lowered, use, spill_everything(profile, use.values), alignment)


def lower_spilled(
    lowered: LoweredStep, use: StepUse, plan: SpillPlan, alignment: int
) -> SpilledStep:
    """The step under a plan that is known."""
    sequence = sequence_of(plan, len(lowered.instructions))
    profile = spilled_profile(use.profile, use.values, sequence)
    homes, tier_bytes = _homes(use.values, sequence, alignment)
    instructions: list[Instruction] = []
    boundary = None
    switches: list[int] = []
    last = lowered.instructions[-1].node
    upcoming = 0
    for item in sequence:
        if isinstance(item, Node):
            if item.number == lowered.boundary:
                boundary = len(instructions)
            if item.number in lowered.gradient_switches:
                switches.append(len(instructions))
            instructions.append(lowered.instructions[item.number])
            upcoming = item.number + 1
            continue
        node = lowered.instructions[upcoming].node if upcoming < len(lowered.instructions) else last
        value = item.absence.value
        slot = -1
        if item.end is End.LEAVE and not use.values[value].is_persistent:
            slot = use.slot_before(value, item.absence.leave)
        copies = item.absence.copies
        home = homes.get(value, 0)
        instructions.append(MoveStorage(node, _ENDS[item.end], value, slot, home, copies))
    sizes = [use.values[one.value].size for one in plan.absences]
    outs = sum(use.values[one.value].size for one in plan.absences if one.copies)
    stays = sum(
        use.values[one.value].size for one in plan.absences if one.fetch > len(lowered.instructions)
    )
    return SpilledStep(
        plan,
        dataclasses.replace(
            lowered, instructions=instructions, boundary=boundary, gradient_switches=switches
        ),
        StepMemory(profile, alignment),
        {value: use.inputs[value] for value in plan.away},
        sum(use.values[value].size for value in plan.away),
        tier_bytes,
        sum(sizes) - stays + outs,
    )


def _homes(
    values: Sequence[MovableValue], sequence: Sequence[Node | Move], alignment: int
) -> tuple[dict[int, int], int]:
    """The offset in the tier of each value that lies there, and the bytes of the tier."""
    profile, order = homes_of(values, sequence).profile(len(sequence))
    if profile is None:
        return {}, 0
    memory = StepMemory(profile, alignment)
    return dict(zip(order, map(int, memory.solo_offsets), strict=True)), memory.extent
