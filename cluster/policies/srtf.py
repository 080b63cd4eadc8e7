"""Shortest remaining time first."""

from __future__ import annotations

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.ranked import RankedPolicy
from waterflow.cluster.state import JobState


class ShortestRemainingTime(RankedPolicy):
    """Needs to know how long jobs take: the best mean of a single GPU, and an ideal elsewhere."""

    name = "srtf"
    source = "Tiresias and Muri, baseline"
    summary = "the least time to go first; preempts, and has to know durations"

    def urgency(self, job: JobState, now: float) -> Rank:
        """Seconds to go."""
        return (job.remaining(now),)
