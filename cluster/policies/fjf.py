"""First job that fits first: first in, first out, but jobs that fit pass those that do not."""

from __future__ import annotations

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.ranked import place_all
from waterflow.cluster.state import NOTHING, ClusterState, Plan


class FitJobFirst(Policy):
    """Starts, in the order of submission, whatever fits; small jobs find room sooner."""

    name = "fjf"
    source = "simulator of Tiresias"
    summary = "in the order of submission, those that fit; small jobs pass large ones"

    def decide(self, state: ClusterState) -> Plan:
        """Start all that fit."""
        free = state.free
        if not free or not state.waiting:
            return NOTHING
        walk, starts = state.pending().walk(state.allowance()), []
        while head := walk.best(free):
            starts.append(head.job)
            free -= head.gpus
            walk.take()
        return Plan(start=place_all(state, starts, ())) if starts else NOTHING
