"""Shortest remaining service first."""

from __future__ import annotations

from waterflow.cluster.pending import Rank
from waterflow.cluster.policies.ranked import RankedPolicy
from waterflow.cluster.state import JobState


class ShortestRemainingService(RankedPolicy):
    """Like the shortest remaining time, times GPUs: a short job on many GPUs is not cheap."""

    name = "srsf"
    source = "Tiresias and Muri, baseline"
    summary = "the fewest GPU seconds to go first; preempts, and has to know durations"

    def urgency(self, job: JobState, now: float) -> Rank:
        """GPU seconds to go."""
        return (job.remaining(now) * job.spec.gpus,)
