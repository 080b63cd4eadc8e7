"""Waterwave's policy: groups of equal size, Algorithm 1 (Waterwave, section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from waterflow.common.errors import BudgetError, JobError
from waterflow.partitioner.groups import NodeGroup, partition
from waterflow.partitioner.policies.arrangement import (
    PAIR_SECONDS,
    GroupTable,
    arrangements,
    deal_lanes,
)
from waterflow.partitioner.policies.base import PlanJob, Policy, check_request
from waterflow.partitioner.policies.temporal import one_after_another
from waterflow.partitioner.profile import node_times
from waterflow.partitioner.schedule import Schedule, planned_peak

SPLITS_OF_LARGEST_PEAK = (1, 2, 4, 8, 16, 32)
"""Split sizes tried: the largest transient peak of the jobs divided by each of these."""

PUBLISHED_SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""Those of the published form: 32 GB over 6 GB, its best, is about 5 (Waterwave, Figure 8)."""

Cut = tuple[int, tuple[tuple[NodeGroup, ...], ...]]
"""A split size in bytes and the groups of every job."""


class WaterWave(Policy):
    """One job's backward beside another's forward, groups of one common split size.

    ``split_size`` is in bytes; None tries several and keeps the one predicted to take the least
    time. The number p of allocation groups that the second job runs early is not taken from the
    published formula, which assumes groups of exactly the split size, but searched for: all that
    are possible, the formula's among them, are checked under worst-order accounting, down to so
    late a start that the jobs run one after another. Raises JobError for a split size below 1.

    ``published`` keeps to Algorithm 1 as it is printed: the second job begins at the latest when
    the first has reached its peak, and BudgetError tells that the jobs do not fit so.
    """

    name: ClassVar[str] = "waterwave"

    def __init__(self, split_size: int | None = None, published: bool = False) -> None:
        if split_size is not None and split_size < 1:
            raise JobError(f"split_size must be at least 1 byte, it is {split_size}")
        self.split_size = split_size
        self.published = published

    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """Plan a round; see ``Policy.schedule``. One lane gives the order of ``temporal``."""
        check_request(jobs, budget, lanes)
        return quickest(self.name, jobs, budget, lanes, self._cuts(jobs), self.published)

    def _cuts(self, jobs: Sequence[PlanJob]) -> Iterable[Cut]:
        largest = max(job.profile.transient_peak_bytes for job in jobs)
        splits = PUBLISHED_SPLITS if self.published else SPLITS_OF_LARGEST_PEAK
        sizes = {max(1, largest // parts) for parts in splits}
        if self.split_size is not None:
            sizes = {self.split_size}
        previous = None
        for size in sorted(sizes, reverse=True):
            groups = tuple(partition(job.profile, size) for job in jobs)
            if groups != previous:
                yield size, groups
            previous = groups


def quickest(
    policy: str,
    jobs: Sequence[PlanJob],
    budget: int,
    lanes: int,
    cuts: Iterable[Cut],
    published: bool = False,
) -> Schedule:
    """The schedule with the least predicted time that fits, among all arrangements of ``cuts``.

    The steps one after another are always among the candidates, so that there is a result when
    ``check_request`` has passed, and none that is predicted to be slower than that. Not so with
    ``published``: only the arrangements of Algorithm 1 are, and BudgetError says that none fits.
    """
    profiles = [job.profile for job in jobs]
    serial = one_after_another(policy, jobs, lanes)
    if lanes == 1 or len(jobs) == 1:
        return serial
    times = node_times(profiles)
    persistent = [profile.persistent_bytes for profile in profiles]
    transient_budget = budget - sum(persistent)
    least = sum(float(time.sum()) + PAIR_SECONDS for time in times)
    if published:
        least = float("inf")
    best = None
    for split_size, groups in cuts:
        table = GroupTable.of(groups, profiles, times)
        first_peak = profiles[table.by_group_bytes()[0]].transient_peak_bytes
        spare_groups = (transient_budget - first_peak) // split_size - 1
        for index in arrangements(table, spare_groups, lanes, published):
            if published and index.max() + 1 == len(index):
                continue  # nothing beside anything else
            cost = table.cost(index)
            if cost < least and table.peak(index) <= transient_budget:
                least, best = cost, (table, index, groups)
    if best is None and published:
        raise BudgetError(f"policy {policy!r} does not fit these jobs into {budget} bytes")
    if best is None:
        return serial
    table, index, groups = best
    pairs = deal_lanes(table, index, lanes)
    peak = planned_peak(groups, pairs, persistent)
    return Schedule(policy=policy, lanes=lanes, groups=groups, pairs=pairs, peak_bytes=peak)
