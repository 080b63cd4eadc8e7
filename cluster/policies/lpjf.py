"""Longest pending job first."""

from __future__ import annotations

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.ranked import place_all
from waterflow.cluster.state import NOTHING, ClusterState, Plan


class LongestPendingFirst(Policy):
    """Whoever has waited longest starts first, and holds up the others while it does not fit.

    Without preemption that is the order of submission. The simulator of Tiresias takes jobs out of
    the list that it is going along, and so passes by the job after each one that it starts;
    `skips` does the same, for its numbers.
    """

    name = "lpjf"
    source = "simulator of Tiresias"
    summary = "the longest pending first"

    def __init__(self, *, skips: bool = False) -> None:
        self._skips = skips

    def decide(self, state: ClusterState) -> Plan:
        """Start from the head of the queue."""
        free = state.free
        if not state.waiting:
            return NOTHING
        walk, starts = state.pending().walk(state.allowance()), []
        while (head := walk.first()) and head.gpus <= free:
            starts.append(head.job)
            free -= head.gpus
            walk.take()
            if self._skips and walk.first():
                walk.next()
        return Plan(start=place_all(state, starts, ())) if starts else NOTHING
