"""Does nothing: what a simulator costs without decisions, and the least that a policy is."""

from __future__ import annotations

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.state import NOTHING, ClusterState, Plan


class Nop(Policy):
    """Never starts a job."""

    name = "nop"
    source = "none"
    summary = "starts nothing"

    def decide(self, state: ClusterState) -> Plan:
        """Nothing."""
        return NOTHING
