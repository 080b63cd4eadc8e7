"""How steep the piles of jobs are that flow together: the choice that runs and studies both make.

A pile that may rise higher falls sooner, and one that is lower leaves its neighbour more. Which is
better depends on the jobs, so the lanes are simulated with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.executor.plan.flow_plan import divided
from waterflow.executor.plan.piled_step import HEADROOMS, PiledStep, Piles
from waterflow.executor.plan.simulate import FlowForecast, simulate_flow
from waterflow.partitioner.policies.fair_share import NextJob, Priority, fair_share
from waterflow.partitioner.profile import node_times

#: So many jobs are simulated for the choice, the largest; more would say little new.
MOST_SIMULATED = 6


@dataclass(frozen=True, eq=False)
class FlowJob:
    """A job that is to flow.

    Attributes:
        steps: the piles of each step that it may take, at least one.
        weight: its share of the lanes' time, beside those of the others.
        priority: whether it goes before others.
    """

    steps: Sequence[Piles]
    weight: float = 1.0
    priority: Priority = Priority.NORMAL

    @property
    def largest(self) -> Piles:
        """The step that stands for the job in a simulation."""
        return max(self.steps, key=lambda step: step.memory.extent)

    def piled(self, headroom: float, room: int) -> list[PiledStep]:
        """All its steps, piled up."""
        return [step.at(headroom, room) for step in self.steps]


@dataclass(frozen=True)
class HeadroomChoice:
    """What was chosen.

    Attributes:
        headroom: of all steps; one of `HEADROOMS`.
        fitting: those under which every step finds room, the largest first.
    """

    headroom: float
    fitting: tuple[float, ...]


def choose_headroom(
    jobs: Sequence[FlowJob], room: int, lanes: int, next_job: NextJob = fair_share
) -> HeadroomChoice | None:
    """The headroom with which the jobs get on best; None where a step has no room even alone.

    Args:
        jobs: those that flow, in the order in which they were admitted.
        room: bytes for their piles, of all lanes together.
        lanes: how many lanes there are.
        next_job: who takes a free lane.
    """
    if max(step.memory.extent for job in jobs for step in job.steps) > room:
        return None
    fitting = tuple(headroom for headroom in HEADROOMS if _tallest(jobs, headroom, room) <= room)
    chosen = jobs[:MOST_SIMULATED]
    if len(jobs) > MOST_SIMULATED:
        order = sorted(jobs, key=lambda job: -job.largest.memory.extent)
        chosen = [job for job in jobs if job in order[:MOST_SIMULATED]]
    if len(chosen) == 1 or _never_wait(_tallest(jobs, fitting[0], room), room, lanes):
        return HeadroomChoice(fitting[0], fitting)

    def seconds(headroom: float) -> float:
        return forecast(chosen, headroom, room, lanes, next_job).seconds

    return HeadroomChoice(min(fitting, key=seconds), fitting)


def forecast(
    jobs: Sequence[FlowJob],
    headroom: float,
    room: int,
    lanes: int,
    next_job: NextJob = fair_share,
) -> FlowForecast:
    """What flowing is like with this headroom. Simulated.

    Args:
        jobs: those that flow, each with its largest step.
        headroom: one under which they fit.
        room: bytes for their piles, of all lanes together.
        lanes: how many lanes there are.
        next_job: who takes a free lane.
    """
    piles = [job.largest.at(headroom, room) for job in jobs]
    times = node_times([job.largest.memory.profile for job in jobs])
    weights, priorities = [job.weight for job in jobs], [job.priority for job in jobs]
    return simulate_flow(piles, times, room, lanes, weights, next_job, priorities)


def _tallest(jobs: Sequence[FlowJob], headroom: float, room: int) -> int:
    return max(piled.extent for job in jobs for piled in job.piled(headroom, room))


def _never_wait(tallest: int, room: int, lanes: int) -> bool:
    """Whether there is memory for any two piles in each range, so that all choices are alike."""
    each, served = divided(room, tallest, lanes)
    return served == lanes and 2 * tallest <= each
