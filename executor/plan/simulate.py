"""Predicts how jobs flow, by the clock of their profiles; nothing runs.

The decisions are the real ones: the same gate admits the groups. What is assumed is that lanes do
not slow each other down, so the times are those of lanes with enough cores, or of a device that
one job does not fill. Everything here is simulated, never measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from waterflow.allocator_ext import _C
from waterflow.executor.plan.flow_plan import divided
from waterflow.executor.plan.piled_step import PiledStep
from waterflow.partitioner.policies.arrangement import PAIR_SECONDS
from waterflow.partitioner.policies.fair_share import NextJob, Priority, Share, fair_share
from waterflow.partitioner.profile import FloatArray
from waterflow.partitioner.schedule import Schedule

#: Steps of the longest job that are simulated; the first ones only fill the pipeline.
_STEPS = 6
_WARM_UP = 2
#: No simulation is longer than this many groups.
_MOST_GROUPS = 40_000
#: Beside jobs that go first others may get nowhere: after so many steps of those that is known.
_MOST_STEPS = 100


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


@dataclass(eq=False)
class _Runner:
    """A job in the simulation."""

    number: int
    piled: PiledStep
    seconds: list[float]
    share: Share
    steps: int = 0
    worked: float = 0.0
    lane: int | None = None
    group: int = 0


@dataclass
class _Clock:
    """Moments of the simulation, and what the lanes did between them."""

    now: float = 0.0
    events: list[tuple[float, int, int]] = field(default_factory=list)  # (time, sequence, lane)
    sequence: int = 0
    alone: float = 0.0  # with one lane at work
    both: float = 0.0  # with more than one
    work: float = 0.0  # of all lanes, added up

    def schedule(self, seconds: float, lane: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + seconds, self.sequence, lane))

    def advance(self) -> int:
        """Goes on to the next event and returns its lane."""
        time, _, lane = heapq.heappop(self.events)
        passed, working = time - self.now, len(self.events) + 1
        if working > 1:
            self.both += passed
        else:
            self.alone += passed
        self.work += passed * working
        self.now = time
        return lane


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
    runners = [
        _Runner(
            i,
            step,
            np.add.reduceat(time, [g.start for g in step.groups]).tolist(),
            Share(weight, priority=priority),
        )
        for i, (step, time, weight, priority) in enumerate(
            zip(steps, times, weights, priorities, strict=True)
        )
    ]
    tallest = max(step.extent for step in steps)
    return _Simulation(runners, *divided(range_bytes, tallest, lanes), next_job).run()


class _Simulation:
    def __init__(self, runners: list[_Runner], size: int, lanes: int, next_job: NextJob) -> None:
        self.runners = runners
        self.next_job = next_job
        highest = min(runner.share.priority for runner in runners)
        self.first = [runner for runner in runners if runner.share.priority is highest]
        guaranteed = self.first if highest is Priority.GUARANTEED else []
        self.open_to_others = lanes - min(len(guaranteed), lanes - 1)
        self.gate = _C.Gate(size, lanes)
        self.on_lane: list[_Runner | None] = [None] * lanes
        self.running = [False] * lanes
        self.clock = _Clock()
        self.spans: list[SimulatedSpan] = []

    def run(self) -> FlowForecast:
        goal, groups = _STEPS, 0
        warm: tuple[float, ...] = self._marks()
        warming = True
        self._dispatch()
        while self.clock.events and groups < _MOST_GROUPS:
            self._finish_group(self._advance())
            self._dispatch()
            groups += 1
            least = min(runner.steps for runner in self.runners)
            # Beside a step that is hundreds of times shorter, a long one does not get that far.
            if warming and (least >= _WARM_UP or groups >= _MOST_GROUPS // 2):
                warming, warm = False, self._marks()
            if least >= goal or self._others_get_nowhere():
                break
        passed, alone, both, work, waits, *worked = (
            after - before for after, before in zip(self._marks(), warm, strict=True)
        )
        # Of the work, not of the steps: jobs are in the middle of theirs when the clock is read.
        rounds = work / sum(sum(runner.seconds) for runner in self.runners)
        return FlowForecast(
            seconds=passed / rounds,
            # Never above 1: a rounded sum is no less than what was added.
            overlap=both / (alone + both) if both else 0.0,
            waits=waits / rounds,
            spans=tuple(self.spans),
            speeds=tuple(min(1.0, seconds / passed) for seconds in worked),
        )

    def _marks(self) -> tuple[float, ...]:
        clock, worked = self.clock, [runner.worked for runner in self.runners]
        return clock.now, clock.alone, clock.both, clock.work, self.gate.waits, *worked

    def _others_get_nowhere(self) -> bool:
        if len(self.first) == len(self.runners):
            return False
        return min(runner.steps for runner in self.first) >= _MOST_STEPS

    def _advance(self) -> int:
        before = self.clock.now
        lane = self.clock.advance()
        for runner, running in zip(self.on_lane, self.running, strict=True):
            if runner is not None and running:
                runner.worked += self.clock.now - before
        return lane

    def _finish_group(self, lane: int) -> None:
        runner = self.on_lane[lane]
        assert runner is not None
        self.gate.leave(lane)
        self.running[lane] = False
        runner.group += 1
        if runner.group == len(runner.seconds):
            self.gate.end(lane)
            self.on_lane[lane] = runner.lane = None
            runner.steps += 1

    def _dispatch(self) -> None:
        """Starts whatever may start; who waits longest is asked first."""
        progress = True
        while progress:
            progress = any(self._start(lane) for lane in range(len(self.on_lane)))

    def _start(self, lane: int) -> bool:
        if self.running[lane] or not (self.on_lane[lane] or self._take_job(lane)):
            return False
        runner = self.on_lane[lane]
        assert runner is not None
        if not self.gate.try_enter(lane):
            return False
        seconds = runner.seconds[runner.group]
        runner.share = runner.share.after(seconds)
        self.running[lane] = True
        now = self.clock.now
        self.spans.append(SimulatedSpan(now, now + seconds, lane, runner.number, runner.group))
        self.clock.schedule(seconds, lane)
        return True

    def _take_job(self, lane: int) -> bool:
        """Gives the lane to a job that is on none, if there is one that may begin."""
        free = [runner for runner in self.runners if runner.lane is None]
        others = sum(runner is not None and runner not in self.first for runner in self.on_lane)
        if others >= self.open_to_others:
            free = [runner for runner in free if runner in self.first]
        if not free:
            return False
        runner = free[self.next_job([runner.share for runner in free])]
        if not self.gate.try_begin(lane, runner.piled.demand):
            return False
        runner.lane, runner.group = lane, 0
        self.on_lane[lane] = runner
        return True


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
