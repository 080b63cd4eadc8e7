"""Smallest job first."""

from __future__ import annotations

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.ranked import RankedPolicy
from waterflow.cluster.state import JobState


class SmallestJobFirst(RankedPolicy):
    """The fewest GPUs first, whatever the length; preempts."""

    name = "sjf"
    source = "simulator of Tiresias"
    summary = "the fewest GPUs first; preempts"

    def urgency(self, job: JobState, now: float) -> Rank:
        """GPUs."""
        return (job.spec.gpus,)
