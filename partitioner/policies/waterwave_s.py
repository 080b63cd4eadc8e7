"""Waterwave's coarse variant: two groups per job (Waterwave, section 5.1.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from waterflow.partitioner.groups import two_groups_at, two_groups_at_peak
from waterflow.partitioner.policies.base import PlanJob, Policy, check_request
from waterflow.partitioner.policies.waterwave import Cut, quickest
from waterflow.partitioner.schedule import Schedule


class WaterWaveS(Policy):
    """Two groups per job, cut at the peak node or where backward begins, the better of the two.

    One cut is chosen for all jobs; a job whose boundary is unknown is cut at its peak.
    ``published`` is as with `WaterWave`.
    """

    name: ClassVar[str] = "waterwave-s"

    def __init__(self, published: bool = False) -> None:
        self.published = published

    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """Plan a round; see ``Policy.schedule``. One lane gives the order of ``temporal``."""
        check_request(jobs, budget, lanes)
        return quickest(self.name, jobs, budget, lanes, self._cuts(jobs), self.published)

    def _cuts(self, jobs: Sequence[PlanJob]) -> Iterable[Cut]:
        # A group is as large as the largest peak here, so that is the split size of the formula.
        size = max(1, *(job.profile.transient_peak_bytes for job in jobs))
        at_peak = tuple(two_groups_at_peak(job.profile) for job in jobs)
        yield size, at_peak
        if any(job.boundary is not None for job in jobs):
            yield (
                size,
                tuple(
                    peak_cut if job.boundary is None else two_groups_at(job.profile, job.boundary)
                    for job, peak_cut in zip(jobs, at_peak, strict=True)
                ),
            )
