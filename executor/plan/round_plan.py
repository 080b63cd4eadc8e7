"""From schedule to addresses: rehearses a round on a copy of the arena and makes memory plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waterflow.allocator_ext import _C
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.tape import CompiledStep
from waterflow.partitioner.schedule import Schedule


@dataclass
class RoundPlan:
    """A round ready to run, again and again, while the arena's persistent part stays as it is.

    Attributes:
        schedule: what runs beside what.
        round: the extension's round.
        memory_plans: the extension's, one per job, with the job's number.
        extent: highest address that the plan uses.
        peak: the most bytes that any interleaving of the lanes can hold at once.
        version: the arena's (`Arena.version`), for which the plan was made.
    """

    schedule: Schedule
    round: Any
    memory_plans: list[Any]
    extent: int
    peak: int
    version: int

    def begin(self, arena: Any, own_blocks: bool) -> None:
        """Puts the memory plans at their start.

        Args:
            arena: the arena of the plan.
            own_blocks: steps keep their blocks themselves, without the allocator's lock; not where
                the arena records every event or blocks survive the step.

        Raises:
            StalePlan: the steps keep their blocks, and a place of the plan is not free any more.
        """
        beside = _C.RoundMemory(self.extent, arena.statistics().capacity)
        _C.begin_plans(arena, self.memory_plans, beside, own_blocks)

    @property
    def deviations(self) -> int:
        """Requests, since the plan was made, that were not as profiled."""
        return sum(memory_plan.deviations for memory_plan, _ in self.memory_plans)


def plan_round(
    arena: Any,
    schedule: Schedule,
    steps: Sequence[tuple[int, CompiledStep, StepMemory]],
) -> RoundPlan | None:
    """Rehearses the schedule on the arena as it is now; None where it does not fit.

    Args:
        arena: the arena, no step under way.
        schedule: one step of each job.
        steps: for each job of the schedule its number, its compiled step and its memory.
    """
    jobs = [job for job, _, _ in steps]
    memories = [memory for _, _, memory in steps]
    state = arena.snapshot()
    result = rehearse_round(state, schedule, jobs, memories)
    if not result.fits:
        return None
    memory_plans = [
        memory.memory_plan(offsets, state.version())
        for (_, _, memory), offsets in zip(steps, result.offsets, strict=True)
    ]
    round_ = make_round(schedule, steps, memory_plans)
    extent = max(int(result.extent), state.live_end())
    named = list(zip(memory_plans, jobs, strict=True))
    return RoundPlan(schedule, round_, named, extent, int(result.peak), state.version())


def rehearse_round(
    state: Any, schedule: Schedule, jobs: Sequence[int], memories: Sequence[StepMemory]
) -> Any:
    """The places of a schedule's blocks in an allocator of this state, and its peak and extent.

    Args:
        state: an allocator; it stays as it is.
        schedule: one step of each job.
        jobs: the jobs' numbers.
        memories: the memory of their steps.
    """
    arrays = [
        memory.arrays(groups) for groups, memory in zip(schedule.groups, memories, strict=True)
    ]
    slots = [
        [(lane, ref.job, ref.group) for lane, ref in enumerate(pair) if ref is not None]
        for pair in schedule.pairs
    ]
    return _C.rehearse(state, arrays, list(jobs), slots)


def make_round(
    schedule: Schedule,
    steps: Sequence[tuple[int, CompiledStep, Any]],
    memory_plans: Sequence[Any],
) -> Any:
    """The extension's form of a schedule."""
    tasks: list[list[tuple[int, int, int, int, int]]] = []
    for pair in schedule.pairs:
        tasks.append([])
        for lane, ref in enumerate(pair):
            if ref is not None:
                group = schedule.groups[ref.job][ref.group]
                tasks[-1].append((lane, ref.job, ref.group, group.start, group.stop))
    jobs = [
        (step.tape, memory_plan, job, step.device_input)
        for (job, step, _), memory_plan in zip(steps, memory_plans, strict=True)
    ]
    return _C.Round(jobs, tasks)


def solo_round(job: int, step: CompiledStep) -> Any:
    """One job's whole step on lane 0, its memory found as it goes (no plan)."""
    return _C.Round([(step.tape, None, job, step.device_input)], [[(0, 0, 0, 0, len(step.tape))]])
