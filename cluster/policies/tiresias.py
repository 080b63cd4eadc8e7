"""Tiresias: discretised least attained service in two dimensions (Gu et al., NSDI 2019).

Jobs begin in the first queue and move one queue down whenever their service, GPUs times seconds,
reaches the queue's limit. Earlier queues are served first; within a queue, those that run, then
those that wait, first come, first served, and whatever does not fit is passed by. No duration needs
to be known. `Las` is the same with seconds alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf
from typing import Literal

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.ranked import place_all
from waterflow.cluster.quotas import Account
from waterflow.cluster.state import ClusterState, JobState, Plan

#: Tiresias' simulator: GPU seconds at which a job leaves each queue but the last.
LIMITS = (3250.0, 7200.0)
Wakes = Literal["watch", "tiresias", "muri"]
_BEHIND = 1e9  # positions of those moved down lie behind those that start at the same time


class Tiresias(Policy):
    """Two-dimensional discretised LAS.

    `wakes` says when it looks for jobs that have reached a limit: exactly then ("watch"), or at
    every event and at whole seconds, by the formulas of two simulators.
    """

    name = "tiresias"
    source = "Tiresias, section 3.2 (2D-LAS)"
    summary = "queues by GPU seconds had; preempts, and need not know durations"
    by_gpus = True
    knows_opportunistic = True

    def __init__(self, limits: Sequence[float] = LIMITS, wakes: Wakes = "watch") -> None:
        self._limits = tuple(limits)
        self._wakes = wakes

    def level(self, job: JobState) -> int:
        """Opportunistic jobs have a queue of their own, after all others."""
        return len(self._limits) + 1 if job.opportunistic else 0

    def rank(self, job: JobState, now: float, turn: int) -> Rank:
        """Behind all that wait; those that were preempted wait before them."""
        return (turn, job.spec.index)

    def decide(self, state: ClusterState) -> Plan:
        """Move down, take in queue by queue, preempt what is left over."""
        down = self._moved_down(state)
        keep, stops, starts = _take_in(state, down)
        ranks = new_ranks(state, down, stops, starts)
        watch, wake = {}, inf
        if self._wakes == "watch":
            watch = self._watch(state, [*starts, *keep], ranks)
        else:
            wake = self._wake(state, stops, starts, ranks)
        start = place_all(state, starts, stops) if starts else {}
        return Plan(stop=tuple(stops), start=start, ranks=ranks, watch=watch, wake=wake)

    def _service(self, job: JobState, now: float) -> float:
        seconds = job.executed + (now - job.since if job.running else 0.0)
        if self._wakes != "watch":
            return seconds * job.spec.gpus if self.by_gpus else seconds
        return job.service(now) if self.by_gpus else seconds

    def _moved_down(self, state: ClusterState) -> list[JobState]:
        """Running jobs that have reached the limit of their queue, as they came."""
        last = len(self._limits)
        if self._wakes == "watch":
            jobs: Iterable[JobState] = (state.jobs[index] for index in state.reached)
            return [job for job in jobs if job.running and job.level < last]
        low = (j for level in range(min(last, state.levels)) for j in state.running(level).values())
        found = [j for j in low if self._service(j, state.now) >= self._limits[j.level]]
        return sorted(found, key=lambda job: job.spec.index)

    def _watch(
        self, state: ClusterState, jobs: Iterable[int], ranks: dict[int, tuple[int, Rank]]
    ) -> dict[int, float]:
        found = {}
        for index in jobs:
            job = state.jobs[index]
            level = ranks[index][0] if index in ranks else job.level
            limit = self._limits[level] if level < len(self._limits) else inf
            # What is watched is GPU seconds; a job that is never resized has them for `limit`.
            found[index] = limit if self.by_gpus else limit * job.spec.gpus
        return found

    def _wake(
        self,
        state: ClusterState,
        stops: Sequence[int],
        starts: Sequence[int],
        ranks: dict[int, tuple[int, Rank]],
    ) -> float:
        stopped, wake = set(stops), inf
        running = [job for job in state.all_running() if job.spec.index not in stopped]
        for job in (*running, *(state.jobs[index] for index in starts)):
            index = job.spec.index
            level = ranks[index][0] if index in ranks else job.level
            if level >= len(self._limits):
                continue
            seconds = job.executed + (state.now - job.since if job.running else 0.0)
            limit, gpus = self._limits[level], job.spec.gpus if self.by_gpus else 1
            if self._wakes == "muri":
                jump = (ceil(limit / gpus) if self.by_gpus else limit) - seconds + state.now
            else:  # whole seconds, and Python 2's division
                jump = (limit - seconds) // gpus + state.now
            wake = min(wake, jump)
        return wake


class Las(Tiresias):
    """Discretised LAS by seconds alone."""

    name = "las"
    source = "Tiresias, section 3.2 (1D)"
    summary = "queues by seconds run; preempts, and need not know durations"
    by_gpus = False


def _take_in(
    state: ClusterState, down: Sequence[JobState]
) -> tuple[list[int], list[int], list[int]]:
    """Who moved down and keeps running, who stops, who starts.

    A queue whose running jobs all fit is not looked through, so a decision costs what it changes.
    """
    room, allowance = state.available, state.allowance(running=False)
    keep: list[int] = []
    stops: list[int] = []
    starts: list[int] = []
    moved = {job.spec.index for job in down}

    def keep_or_stop(job: JobState) -> bool:
        nonlocal room
        account, gpus = state.account(job), len(job.gpus)
        fits = gpus <= room and allowance.fits(account, gpus)
        if fits:
            room -= gpus
            allowance.take(account, gpus)
        else:
            stops.append(job.spec.index)
        return fits

    for level in range(max(state.levels, 1 + max((j.level + 1 for j in down), default=0))):
        if level < state.levels:
            used, accounts = _used(state, level, down)
            if used <= room and all(allowance.fits(one, gpus) for one, gpus in accounts.items()):
                room -= used
                for account, gpus in accounts.items():
                    allowance.take(account, gpus)
            else:
                for job in sorted(state.running(level).values(), key=lambda job: job.rank):
                    if job.spec.index not in moved:
                        keep_or_stop(job)
            walk = state.pending(level).walk(allowance)
            while head := walk.best(room):
                starts.append(head.job)
                room -= head.gpus
                walk.take()
        for job in down:
            if job.level + 1 == level and keep_or_stop(job):
                keep.append(job.spec.index)
    return keep, stops, starts


def _used(
    state: ClusterState, level: int, down: Sequence[JobState]
) -> tuple[int, Mapping[Account, int]]:
    """GPUs of a queue's running jobs but those that move down: all, and by account."""
    used, accounts = state.used(level), state.used_by(level)
    used -= sum(len(job.gpus) for job in down if job.level == level)
    if not accounts or not down:
        return used, accounts
    left = Counter(accounts)
    for job in down:
        if job.level == level:
            left[state.account(job)] -= len(job.gpus)
    return used, left


def new_ranks(
    state: ClusterState, down: Sequence[JobState], stops: Sequence[int], starts: Sequence[int]
) -> dict[int, tuple[int, Rank]]:
    """New places: starts behind those that run, preempted jobs before those that wait."""
    turn = float(state.turn)
    ranks: dict[int, tuple[int, Rank]] = {}
    for position, index in enumerate(starts):
        ranks[index] = (state.jobs[index].level, (turn, position))
    for position, index in enumerate(stops):
        ranks[index] = (state.jobs[index].level, (-turn, position))
    for position, job in enumerate(down):
        ranks[job.spec.index] = (job.level + 1, (turn, _BEHIND + position))
    return ranks
