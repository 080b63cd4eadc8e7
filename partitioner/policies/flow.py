"""waterflow's own policy: lanes that are not in lockstep, and memory that flows between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from waterflow.partitioner.policies.base import PlanJob, Policy, check_request
from waterflow.partitioner.policies.temporal import one_after_another
from waterflow.partitioner.schedule import Schedule


class Flow(Policy):
    """Each lane takes one step after another; a gate admits node groups while memory lasts.

    There are no rounds: a lane that is free takes the next job (`next_job`), and a step goes on as
    soon as its next group fits beside what the other lane holds. Whatever fits one after another
    flows. How lanes share memory is in `executor.plan.flow_plan`.
    """

    name: ClassVar[str] = "flow"
    flows: ClassVar[bool] = True

    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """The order of steps that cannot flow, such as a job's first: one after another."""
        check_request(jobs, budget, lanes)
        return one_after_another(self.name, jobs, lanes)
