"""Schedules to try in turn: where one finds no addresses, a safer one may.

A policy keeps the sum of bytes within the budget; whether every block finds an address is known
only once the schedule has been rehearsed on the allocator. A run and a study try the same ones, so
that what a study says fits is what a run finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from waterflow.common.errors import BudgetError
from waterflow.partitioner.policies.base import PlanJob, Policy
from waterflow.partitioner.policies.temporal import Temporal
from waterflow.partitioner.schedule import Schedule

_TIGHTER = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65)
"""Shares of the budget: a schedule that the rehearsal refuses is sought again under a smaller."""


def schedules_to_try(
    policy: Policy, jobs: Sequence[PlanJob], budget: int, lanes: int
) -> Iterator[Schedule]:
    """Schedules to rehearse one after another, from the boldest; a policy's last is the safest.

    The last one is one job after another, but for a policy that keeps to its published form. There
    may be none at all: where nothing fits ``budget`` bytes.
    """
    with contextlib.suppress(BudgetError):
        for share in _TIGHTER:
            yield policy.schedule(jobs, int(budget * share), lanes)
    if not policy.published:
        with contextlib.suppress(BudgetError):
            yield Temporal().schedule(jobs, budget, lanes)
