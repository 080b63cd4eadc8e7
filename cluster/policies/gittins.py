"""Tiresias with the Gittins index (Gu et al., NSDI 2019, section 3.2).

Where the distribution of services is known, but not whose is whose: within a queue, the job runs
first that is the likeliest to be done within the next quantum, for the service that it would take.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from math import inf

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.ranked import RankedPolicy
from waterflow.cluster.policies.room import Count, MakeRoom
from waterflow.cluster.policies.tiresias import LIMITS
from waterflow.cluster.state import ClusterState, JobState, Plan
from waterflow.cluster.tables import tiresias_services

QUANTUM = 3250.0  # GPU seconds


@cache
def indices(services: tuple[float, ...], quantum: float) -> tuple[float, ...]:
    """The Gittins index, times a million, of a job with just less service than each of those.

    As Tiresias' simulator computes it, to its digits: the service that is expected counts from 0,
    not from what a job has had.
    """
    count, found = len(services), []
    for service in services:
        had = service - 1
        first = bisect_right(services, had)
        last = bisect_right(services, had + quantum)
        if had + quantum > services[-1] - 1:
            last = count - 1
        done = round((last - first) / (count - first), 5)
        expected = sum(services[first:last]) + quantum * (count - last)
        found.append(round(done * 1e6 / round(expected / (count - first), 5), 4))
    return tuple(found)


class Gittins(RankedPolicy):
    """2D-Gittins in discretised queues; `services` is what is known of jobs like these."""

    name = "gittins"
    source = "Tiresias, section 3.2 (2D-Gittins)"
    summary = "the likeliest to end soon first; preempts, and has to know the distribution"

    def __init__(
        self,
        services: Sequence[float] = (),
        limits: Sequence[float] = LIMITS,
        room: MakeRoom = Count,
    ) -> None:
        super().__init__(room)
        self._services = tuple(services) or tiresias_services()
        # What has had more service than any that is known comes last.
        self._orders = (*(-index for index in indices(self._services, QUANTUM)), 0.0)
        self._limits = tuple(limits)

    def urgency(self, job: JobState, now: float) -> Rank:
        """Queue, then index, then submission."""
        service = job.service(now)
        order = self._orders[bisect_right(self._services, service)]
        return (bisect_right(self._limits, service), order, job.spec.submit)

    def decide(self, state: ClusterState) -> Plan:
        """Like all that rank; asked again when a job reaches the next queue."""
        plan = super().decide(state)
        stops = set(plan.stop)
        watched = [index for index in (*plan.start, *state.reached) if index not in stops]
        watch = {index: self._next_limit(state.jobs[index], state) for index in watched}
        return Plan(stop=plan.stop, start=plan.start, watch=watch)

    def _next_limit(self, job: JobState, state: ClusterState) -> float:
        at = bisect_right(self._limits, job.service(state.now))
        # One that has been reached all but a rounding error has been reached.
        if at < len(self._limits) and job.spec.index in state.reached:
            at += self._limits[at] - job.service(state.now) < 1e-6
        return self._limits[at] if at < len(self._limits) else inf
