"""What a policy makes of jobs under a budget: whether they fit, the peak, the overlap, the time.

The memory is decided by the real allocator on virtual addresses, as a run would decide it: what
fits here fits there, fragmentation included. Times are those of the footprints' profiles, and what
follows from them is simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from waterflow.allocator_ext import _C
from waterflow.executor.plan.flow_plan import most_together
from waterflow.executor.plan.headroom import FlowJob, choose_headroom, forecast
from waterflow.executor.plan.need import MemoryNeed, fit_in_turn
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.round_plan import rehearse_round
from waterflow.executor.plan.simulate import (
    SimulatedSpan,
    serial_seconds,
    simulate_round,
)
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.partitioner import PlanJob, Policy, get_policy
from waterflow.partitioner.groups import NodeGroup
from waterflow.partitioner.policies import WaterWave, WaterWaveS
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.partitioner.policies.fallback import schedules_to_try
from waterflow.partitioner.profile import Profile, node_times
from waterflow.partitioner.schedule import Schedule
from waterflow.report.timeline import Timeline
from waterflow.study.footprint import Footprint

STUDIED: dict[str, Callable[[], Policy]] = {
    "temporal": lambda: get_policy("temporal"),
    "waterwave-s": lambda: WaterWaveS(published=True),
    "waterwave": lambda: WaterWave(published=True),
    "flow": lambda: get_policy("flow"),
}
"""Policies to compare. Those of Waterwave keep to its form: a run goes on one after another where
they do not fit, which here counts as temporal sharing."""


@dataclass(frozen=True)
class PolicyEstimate:
    """What a policy makes of some jobs under a budget.

    Attributes:
        policy: its name.
        peak_bytes: the most that the jobs hold while all of them train, in any order of events.
        extent_bytes: the highest address that they need.
        seconds: for one step of every job, in the mean. Simulated.
        serial_seconds: the same one job after another. Simulated.
        overlap: fraction of the busy time with more than one lane at work. Simulated.
        syncs_per_step: how often lanes wait for each other, per step of every job.
        spans: what runs when, job and group counted from 0. Simulated.
        groups: the jobs' node groups.
        speeds: of each job, over its speed alone. Simulated.
    """

    policy: str
    peak_bytes: int
    extent_bytes: int
    seconds: float
    serial_seconds: float
    overlap: float
    syncs_per_step: float
    spans: tuple[SimulatedSpan, ...] = dataclasses.field(repr=False, default=())
    groups: tuple[tuple[NodeGroup, ...], ...] = dataclasses.field(repr=False, default=())
    speeds: tuple[float, ...] = ()

    @property
    def speedup(self) -> float:
        """How many times as fast as one job after another. Simulated."""
        return self.serial_seconds / self.seconds if self.seconds else 1.0


class SizedJob:
    """A job's footprint, with what is worked out from it and used again."""

    def __init__(
        self,
        footprint: Footprint,
        alignment: int,
        weight: float = 1.0,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Takes the footprint, the arena's alignment, and what the job is beside others."""
        self.footprint = footprint
        self.steady = StepMemory(footprint.steady, alignment)
        self._first = None if footprint.first is None else StepMemory(footprint.first, alignment)
        self.flow_job = FlowJob([Piles(self.steady)], weight, priority)

    @property
    def persistent_bytes(self) -> int:
        """Bytes held between the steps, once there have been some."""
        return self.footprint.persistent_bytes

    @property
    def need(self) -> MemoryNeed:
        """What it needs to take any of its steps."""
        steps = [(self.steady, 0)]
        if self._first is not None:
            steps.append((self._first, self._first.profile.surviving_bytes))
        return MemoryNeed.of(self.persistent_bytes, steps)

    @property
    def solo_bytes(self) -> int:
        """The smallest budget under which it can run alone."""
        return self.need.alone_bytes

    @property
    def profile(self) -> Profile:
        """The profile of a steady step."""
        return self.footprint.steady

    def plan_job(self) -> PlanJob:
        """The job as a policy sees it."""
        profile = self.profile.beside(persistent_bytes=self.persistent_bytes)
        return PlanJob(self.footprint.name, profile, self.footprint.boundary)


def fits_in_turn(sized: Sequence[SizedJob], memory: int) -> bool:
    """Whether the jobs fit one after another: what every job needs before it may enter."""
    return fit_in_turn([sized_job.need for sized_job in sized], memory)


class Admitted(NamedTuple):
    """Who is let into a budget at first, as places in the list of jobs.

    Attributes:
        first: in the order in which they are asked: by priority, then as they were given.
        waiting: who waits for room until others have ended.
        refused: who does not fit even alone, and fails.
    """

    first: tuple[int, ...]
    waiting: tuple[int, ...]
    refused: tuple[int, ...]


def admitted(sized: Sequence[SizedJob], memory: int, alignment: int) -> Admitted:
    """Whom a run lets in first; from one that finds no room on, all wait. No job is spilled."""
    memory -= memory % alignment
    first: list[int] = []
    waiting: list[int] = []
    refused: list[int] = []
    for place in sorted(range(len(sized)), key=lambda n: sized[n].flow_job.priority):
        if not fits_in_turn([sized[place]], memory):
            refused.append(place)
        elif waiting or not fits_in_turn([sized[n] for n in (*first, place)], memory):
            waiting.append(place)
        else:
            first.append(place)
    return Admitted(tuple(first), tuple(waiting), tuple(refused))


def fits(
    sized: Sequence[SizedJob], memory: int, policy: str, alignment: int, lanes: int = 2
) -> bool:
    """Whether `estimate` would find something; for searches, it simulates no more than need be."""
    if STUDIED[policy]().flows:  # what fits in turn flows
        return fits_in_turn(sized, memory - memory % alignment)
    return estimate(sized, memory, policy, alignment, lanes) is not None


def estimate(
    sized: Sequence[SizedJob], memory: int, policy: str, alignment: int, lanes: int = 2
) -> PolicyEstimate | None:
    """What the policy makes of these jobs; None where they do not fit.

    Args:
        sized: the jobs.
        memory: bytes that all may hold together.
        policy: one of `STUDIED`.
        alignment: bytes to which the arena rounds.
        lanes: how many node groups may run at once.
    """
    memory -= memory % alignment
    if not fits_in_turn(sized, memory):
        return None
    studied = STUDIED[policy]()
    if studied.flows:
        return _flow(sized, memory, studied, lanes)
    return _in_rounds(sized, memory, studied, alignment, lanes)


def _in_rounds(
    sized: Sequence[SizedJob], memory: int, policy: Policy, alignment: int, lanes: int
) -> PolicyEstimate | None:
    state = _C.Allocator(memory, alignment, lanes)
    for job, sized_job in enumerate(sized):
        if sized_job.persistent_bytes:
            state.allocate(sized_job.persistent_bytes, 0, job)
    state.synchronize()
    plan_jobs = [sized_job.plan_job() for sized_job in sized]
    for schedule in schedules_to_try(policy, plan_jobs, memory, lanes):
        memories = [sized_job.steady for sized_job in sized]
        result = rehearse_round(state, schedule, range(len(sized)), memories)
        if result.fits:
            return _of_round(schedule, result.peak, result.extent, sized)
    return None


def _of_round(
    schedule: Schedule, peak: int, extent: int, sized: Sequence[SizedJob]
) -> PolicyEstimate:
    profiles = [sized_job.profile for sized_job in sized]
    times = node_times(profiles)
    persistent = sum(sized_job.persistent_bytes for sized_job in sized)
    spans = simulate_round(schedule, times)
    seconds = max((span.stop for span in spans), default=0.0)
    alone = [serial_seconds([time]) for time in times]
    return PolicyEstimate(
        policy=schedule.policy,
        peak_bytes=peak,
        extent_bytes=max(extent, persistent),
        seconds=seconds,
        serial_seconds=serial_seconds(times),
        overlap=schedule.overlap(profiles),
        syncs_per_step=float(len(schedule.pairs)),
        spans=spans,
        groups=schedule.groups,
        speeds=tuple(min(1.0, one / seconds) if seconds else 1.0 for one in alone),
    )


def _flow(sized: Sequence[SizedJob], memory: int, policy: Policy, lanes: int) -> PolicyEstimate:
    persistent = sum(sized_job.persistent_bytes for sized_job in sized)
    room = memory - persistent
    jobs = [sized_job.flow_job for sized_job in sized]
    choice = choose_headroom(jobs, room, lanes, policy.next_job)
    assert choice is not None, "what fits in turn flows"
    best = forecast(jobs, choice.headroom, room, lanes, policy.next_job)
    # A run measures its times, and may find another headroom the best.
    reached = max(
        most_together([job.largest.at(headroom, room) for job in jobs], room, lanes)
        for headroom in choice.fitting
    )
    return PolicyEstimate(
        policy=policy.name,
        peak_bytes=persistent + reached,
        extent_bytes=memory,
        seconds=best.seconds,
        serial_seconds=serial_seconds(node_times([sized_job.profile for sized_job in sized])),
        overlap=best.overlap,
        syncs_per_step=best.waits,
        spans=best.spans,
        groups=tuple(job.largest.at(choice.headroom, room).groups for job in jobs),
        speeds=best.speeds,
    )


def timeline_of(found: PolicyEstimate, sized: Sequence[SizedJob]) -> Timeline:
    """What each job holds when, the persistent bytes included, node by node. Simulated."""
    times = node_times([sized_job.profile for sized_job in sized])
    rows = [(0.0, job, sized_job.persistent_bytes) for job, sized_job in enumerate(sized)]
    for span in found.spans:
        profile, group = sized[span.job].profile, found.groups[span.job][span.group]
        nodes = slice(group.start, group.stop)
        ends = span.start + np.cumsum(times[span.job][nodes])
        starts = np.concatenate([[span.start], ends[:-1]])
        persistent = sized[span.job].persistent_bytes
        high = profile.node_high()[nodes] + persistent
        after = profile.node_live()[group.start + 1 : group.stop + 1] + persistent
        for start, stop, most, left in zip(starts, ends, high, after, strict=True):
            rows += [(start, span.job, most), (stop, span.job, left)]
    rows.sort(key=lambda row: row[0])
    seconds, job, held = zip(*rows, strict=True)
    names = [sized_job.footprint.name for sized_job in sized]
    return Timeline(np.array(seconds), np.array(job), np.array(held), names)
