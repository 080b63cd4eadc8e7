"""Plans flow: how the captured steps of jobs are piled up, in the memory that is left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.piled_step import HEADROOMS, FlowPlan, PiledStep, pile_step
from waterflow.executor.plan.round_plan import layout_key, live_end
from waterflow.executor.plan.simulate import simulate_flow
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.partitioner.policies import Policy
from waterflow.partitioner.profile import node_times
from waterflow.steps.prepared import PreparedStep

#: So many jobs are simulated to choose how steep their piles are; more would say little new.
_MOST_SIMULATED = 6
#: Piles kept of a step: another room is another pile, and rooms change with every job that comes.
_MOST_PILES = 16


class FlowPlanner:
    """Makes the plan of jobs that flow, and keeps it for as long as the arena is as it found it."""

    def __init__(self, policy: Policy, lanes: Lanes, residency: Residency) -> None:
        self._policy = policy
        self._lanes = lanes
        self._arena = lanes.arena
        self._residency = residency
        self._plan: FlowPlan | None = None
        self._key: Hashable = None
        self._past = (0, 0)  # waits and deviations of former plans

    @property
    def waits(self) -> int:
        """How often a node group has waited for memory that the other lane held."""
        return self._past[0] + (int(self._plan.gate.waits) if self._plan else 0)

    @property
    def deviations(self) -> int:
        """Requests for memory that were not as profiled."""
        return self._past[1] + (self._plan.deviations if self._plan else 0)

    def plan(self, jobs: Sequence[JobRun]) -> FlowPlan | None:
        """The plan for the captured steps of these jobs; None where there are none, or no room."""
        steps = [(job, step) for job in jobs for step in job.captured.steady]
        among = tuple(step for _, step in steps)
        if (layout_key(self._arena), among) != self._key:
            self._past = (self.waits, self.deviations)
            self._plan = None
            self._plan = self._make(steps) if steps else None  # it may move things
            self._key = layout_key(self._arena), among
        return self._plan

    def _make(self, steps: Sequence[tuple[JobRun, PreparedStep]]) -> FlowPlan | None:
        lowest = max(step.memory.extent for _, step in steps)
        if lowest > self._room():
            self._residency.repack()  # gaps between persistent tensors may be what is in the way
        room = self._room()
        if lowest > room:
            return None
        headroom = self._choose_headroom(steps, room)
        flowing = [
            ((job.number, step.compiled, step.memory), pile_of(step, headroom, room))
            for job, step in steps
        ]
        return FlowPlan(self._arena, self._lanes.lanes, flowing)

    def _room(self) -> int:
        return int(self._arena.statistics().capacity) - live_end(self._arena)

    def _choose_headroom(self, steps: Sequence[tuple[JobRun, PreparedStep]], room: int) -> float:
        """How steep the piles are to be: by simulation, where memory does not suffice for all."""
        last = dict(steps)
        simulated = sorted(last.items(), key=lambda item: -item[1].memory.extent)[:_MOST_SIMULATED]
        fitting = [
            headroom
            for headroom in HEADROOMS
            if all(pile_of(step, headroom, room).extent <= room for _, step in steps)
        ]
        tallest = max(pile_of(step, fitting[0], room).extent for _, step in steps)
        if len(simulated) == 1 or tallest * 2 <= room:
            return fitting[0]
        times = node_times([step.memory.profile for _, step in simulated])
        weights = [job.job.weight for job, _ in simulated]

        def seconds(headroom: float) -> float:
            piles = [pile_of(step, headroom, room) for _, step in simulated]
            return simulate_flow(piles, times, room, self._lanes.lanes, weights).seconds

        return min(fitting, key=seconds)


def pile_of(step: PreparedStep, headroom: float, room: int) -> PiledStep:
    """The step piled up, remembered: most rooms are ample and change nothing."""
    room = min(room, int(step.memory.profile.transient_peak_bytes * (1 + headroom)))
    if (headroom, room) not in step.piles:
        if len(step.piles) >= _MOST_PILES:
            step.piles.clear()
        step.piles[headroom, room] = pile_step(step.memory, headroom, room)
    return step.piles[headroom, room]
