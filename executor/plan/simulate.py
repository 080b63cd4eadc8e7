"""Predicts how jobs flow, by the clock of their profiles; nothing runs.

The decisions are the real ones: the same gate admits the groups. What is assumed is that lanes do
not slow each other down, so the times are those of lanes with enough cores, or of a device that
one job does not fill. Everything here is simulated, never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from waterflow.allocator_ext import _C
from waterflow.executor.plan.flow_plan import divided
from waterflow.executor.plan.piled_step import PiledStep
from waterflow.partitioner.policies.arrangement import PAIR_SECONDS
from waterflow.partitioner.policies.fair_share import NextJob, Priority, Share, fair_share
from waterflow.partitioner.profile import FloatArray
from waterflow.partitioner.schedule import Schedule


class SimulatedSpan(NamedTuple):
    """A node group on a lane; times in seconds, `job` and `group` counted from 0."""

    start: float
    stop: float
    lane: int
    job: int
    group: int


@dataclass(frozen=True)
class FlowForecast:
    """What flowing is predicted to be like, in the long run. Simulated.

    Attributes:
        seconds: for the work of one step of every job.
        overlap: fraction of the busy time during which more than one lane works, 0.0 to 1.0.
        waits: groups per step of every job that have to wait for memory.
        spans: what ran when, from the first step on.
        speeds: of each job, over its speed alone: 0.0 (it gets nowhere) to 1.0.
    """

    seconds: float
    overlap: float
    waits: float
    spans: tuple[SimulatedSpan, ...] = ()
    speeds: tuple[float, ...] = ()


def simulate_flow(
    steps: Sequence[PiledStep],
    times: Sequence[FloatArray],
    range_bytes: int,
    lanes: int,
    weights: Sequence[float] | None = None,
    next_job: NextJob = fair_share,
    priorities: Sequence[Priority] | None = None,
) -> FlowForecast:
    """Lets jobs flow by the clock of their profiles.

    Args:
        steps: a piled step per job, none taller than `range_bytes`.
        times: seconds per node of each step.
        range_bytes: memory for the piles.
        lanes: how many lanes there are.
        weights: the jobs' weights, all 1.0 if None.
        next_job: who takes a free lane, as in a run.
        priorities: who goes first, all equals if None. As in a run a lane is kept for each
            guaranteed job, as long as one is left. How far others would be throttled, a run alone
            can tell: here nobody slows anybody down.
    """
    weights = weights or [1.0] * len(steps)
    priorities = priorities or [Priority.NORMAL] * len(steps)
    shares = [Share(weight, priority=p) for weight, p in zip(weights, priorities, strict=True)]
    highest = min(priorities)
    guaranteed = priorities.count(highest) if highest is Priority.GUARANTEED else 0
    seconds = [
        np.add.reduceat(time, [group.start for group in step.groups]).tolist()
        for step, time in zip(steps, times, strict=True)
    ]
    range_bytes, lanes = divided(range_bytes, max(step.extent for step in steps), lanes)
    warm, end, spans = _C.simulate_flow(
        [
            (step.demand, of_groups, share.weight, share.priority is highest)
            for step, of_groups, share in zip(steps, seconds, shares, strict=True)
        ],
        *(range_bytes, lanes, lanes - min(guaranteed, lanes - 1)),
        lambda free: next_job([shares[job]._replace(used=used) for job, used in free]),
    )
    passed, alone, both, work, waits, *worked = (b - a for a, b in zip(warm, end, strict=True))
    # Of the work, not of the steps: jobs are in the middle of theirs when the clock is read.
    rounds = work / sum(map(sum, seconds))
    return FlowForecast(
        seconds=passed / rounds,
        # Never above 1: a rounded sum is no less than what was added.
        overlap=both / (alone + both) if both else 0.0,
        waits=waits / rounds,
        spans=tuple(map(SimulatedSpan._make, spans)),
        speeds=tuple(min(1.0, seconds / passed) for seconds in worked),
    )


def simulate_round(schedule: Schedule, times: Sequence[FloatArray]) -> tuple[SimulatedSpan, ...]:
    """What runs when in a round, pair after pair, each as long as its longest group. Simulated."""
    spans: list[SimulatedSpan] = []
    begun = 0.0
    for pair in schedule.pairs:
        longest = 0.0
        for lane, ref in enumerate(pair):
            if ref is not None:
                group = schedule.groups[ref.job][ref.group]
                seconds = float(times[ref.job][group.start : group.stop].sum())
                spans.append(SimulatedSpan(begun, begun + seconds, lane, ref.job, ref.group))
                longest = max(longest, seconds)
        begun += longest + PAIR_SECONDS
    return tuple(spans)


def serial_seconds(times: Sequence[FloatArray]) -> float:
    """What one step of every job takes one after another. Simulated."""
    return sum(float(time.sum()) + PAIR_SECONDS for time in times)
