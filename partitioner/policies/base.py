"""What every policy is: a pure function from profiles and a budget to a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.partitioner.policies.fair_share import Share, fair_share, next_residents
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.schedule import Schedule


@dataclass(frozen=True)
class PlanJob:
    """A job as a policy sees it; ``boundary`` is the node where backward begins, if known.

    Raises JobError when the boundary lies outside the step.
    """

    name: str
    profile: Profile
    boundary: int | None = None

    def __post_init__(self) -> None:
        if self.boundary is not None and not 0 <= self.boundary <= self.profile.num_nodes:
            raise JobError(
                f"job {self.name!r}: the boundary {self.boundary} lies outside its step of "
                f"{self.profile.num_nodes} nodes"
            )


class Policy(ABC):
    """Decides which node groups run side by side (``schedule``), and who runs next.

    The contract, which the oracle and the tests hold every policy to:

    - pure and deterministic: the same jobs, budget and lanes give an equal schedule, and nothing
      outside is read or changed;
    - the schedule is one round: each job's step exactly once, its groups in order, no pair empty;
    - ``GroupRef.job`` is the index in ``jobs`` as given, in whatever order the policy works;
    - the worst-order peak, all persistent bytes included, is at most ``budget`` bytes;
    - when the jobs fit one after another, in the order given, there is a schedule; when they do
      not, BudgetError names what each job needs and what would fit.
    """

    name: ClassVar[str]
    flows: ClassVar[bool] = False
    """Whether lanes take steps at their own pace where they can; rounds are for the rest then."""
    published: bool = False
    """Whether it refuses what its published form cannot do, where the jobs would fit in turn."""

    @abstractmethod
    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """Plan one round of ``jobs`` within ``budget`` bytes on ``lanes`` lanes.

        Raises BudgetError when not even one after another fits, JobError when there are no jobs
        or no lanes.
        """

    quantum: float | None = None
    """Seconds after which jobs in memory give way to those that wait for room; None: never."""

    def residents(self, shares: Sequence[Share], fit: Callable[[Sequence[int]], bool]) -> list[int]:
        """The places of the jobs that are in memory for the next quantum.

        Asked where ``quantum`` is not None. Pure, like ``schedule``.

        Args:
            shares: of all jobs that could run; ``used`` counts seconds in memory, by weight.
            fit: whether the jobs at these places fit together.
        """
        return next_residents(shares, fit)

    def next_job(self, waiting: Sequence[Share]) -> int:
        """The place in ``waiting`` of the job that a free lane takes: its fair share, by weight.

        Asked where lanes take steps at their own pace. Pure, like ``schedule``; there is at least
        one job.
        """
        return fair_share(waiting)


def temporal_need(profiles: Sequence[Profile]) -> int:
    """The smallest budget, in bytes, with which the steps fit one after another in this order."""
    survived = peak = 0
    for profile in profiles:
        peak = max(peak, survived + profile.transient_peak_bytes)
        survived += profile.surviving_bytes
    return sum(profile.persistent_bytes for profile in profiles) + peak


def check_request(jobs: Sequence[PlanJob], budget: int, lanes: int) -> None:
    """Raise what ``Policy.schedule`` promises to raise; every policy calls it first."""
    if not jobs:
        raise JobError("there are no jobs to schedule; give at least one")
    if lanes < 1:
        raise JobError(f"lanes is {lanes}; a schedule needs at least one")
    needed = temporal_need([job.profile for job in jobs])
    if needed > budget:
        raise BudgetError(_does_not_fit(jobs, budget, needed))


def _does_not_fit(jobs: Sequence[PlanJob], budget: int, needed: int) -> str:
    lines = [
        f"the jobs do not fit {format_bytes(budget, 2)} ({budget} bytes) even one after another; "
        "each needs:"
    ]
    for job in jobs:
        persistent, transient = job.profile.persistent_bytes, job.profile.transient_peak_bytes
        lines.append(
            f"  {job.name}: {format_bytes(persistent, 2)} held all the time + "
            f"{format_bytes(transient, 2)} at the peak of its step"
        )
    lines.append(
        f"one after another, {len(jobs)} jobs need {format_bytes(needed, 2)} ({needed} bytes)"
    )
    fitting = _fitting(jobs, budget)
    if fitting:
        lines.append(f"in this budget would fit: {', '.join(job.name for job in fitting)}")
    else:
        lines.append("none of them fits this budget alone; use smaller batches or models")
    return "\n".join(lines)


def _fitting(jobs: Sequence[PlanJob], budget: int) -> list[PlanJob]:
    """Jobs that fit together one after another, taken in the order given."""
    chosen: list[PlanJob] = []
    for job in jobs:
        if temporal_need([other.profile for other in [*chosen, job]]) <= budget:
            chosen.append(job)
    return chosen
