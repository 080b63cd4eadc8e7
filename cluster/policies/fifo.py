"""First in, first out."""

from __future__ import annotations

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.ranked import place_all
from waterflow.cluster.state import NOTHING, ClusterState, Plan


class Fifo(Policy):
    """Starts jobs in the order in which they came; nobody passes one that does not fit."""

    name = "fifo"
    source = "baseline of every paper"
    summary = "in the order of submission; the first that does not fit holds up all others"

    def decide(self, state: ClusterState) -> Plan:
        """Start from the head of the queue."""
        free = state.free
        if not free or not state.waiting:
            return NOTHING
        walk, starts = state.pending().walk(state.allowance()), []
        while (head := walk.first()) and head.gpus <= free:
            starts.append(head.job)
            free -= head.gpus
            walk.take()
        return Plan(start=place_all(state, starts, ())) if starts else NOTHING
