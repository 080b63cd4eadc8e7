"""The baseline: one job's whole step after another's (Waterwave, section 5.1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from waterflow.partitioner.groups import cut_at
from waterflow.partitioner.policies.base import PlanJob, Policy, check_request
from waterflow.partitioner.schedule import GroupRef, Schedule, planned_peak


class Temporal(Policy):
    """One group per job, on lane 0, in the order given; the other lanes stay idle."""

    name: ClassVar[str] = "temporal"

    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """Run the jobs one after another; see ``Policy.schedule`` for what is raised."""
        check_request(jobs, budget, lanes)
        return one_after_another(self.name, jobs, lanes)


def one_after_another(policy: str, jobs: Sequence[PlanJob], lanes: int) -> Schedule:
    """The schedule that needs the least memory of all in this order; the budget is not checked."""
    groups = tuple(cut_at(job.profile, ()) for job in jobs)
    idle = (None,) * (lanes - 1)
    pairs = tuple((GroupRef(job, 0), *idle) for job in range(len(jobs)))
    peak = planned_peak(groups, pairs, [job.profile.persistent_bytes for job in jobs])
    return Schedule(policy=policy, lanes=lanes, groups=groups, pairs=pairs, peak_bytes=peak)
