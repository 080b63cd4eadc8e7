"""Plans rounds: asks the policy for schedules and rehearses them until one has addresses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from waterflow.common.errors import BudgetError
from waterflow.engine.in_flight import ScheduledStep
from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.round_plan import RoundPlan, plan_round
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.partitioner import PlanJob, Policy
from waterflow.partitioner.policies.fallback import schedules_to_try
from waterflow.partitioner.schedule import Schedule

#: Plans kept; more layouts than this mean that something moves in every round.
_KEPT_PLANS = 64


class RoundPlanner:
    """Makes the plan of a round, and keeps it for as long as the arena is as the plan found it."""

    def __init__(self, policy: Policy, lanes: Lanes, residency: Residency) -> None:
        self._policy = policy
        self._lanes = lanes
        self._arena = lanes.arena
        self._residency = residency
        self._plans: dict[Hashable, RoundPlan] = {}
        self._schedules: dict[Hashable, Schedule] = {}
        self._past_deviations = 0
        self.texts: dict[str, None] = {}  # the schedules used, for the report

    @property
    def deviations(self) -> int:
        """Requests for memory so far that were not as planned."""
        return self._past_deviations + sum(plan.deviations for plan in self._plans.values())

    def plan(self, steps: Sequence[ScheduledStep]) -> RoundPlan:
        """The plan for one step of each job.

        Raises:
            BudgetError: not even one after another fits; what user code keeps is in the way.
        """
        key = tuple((scheduled.job.number, scheduled.step) for scheduled in steps)
        known = self._plans.get((int(self._arena.version), key))
        if known is not None:
            return known
        plan = self._make(key, steps)  # it may move things, and so change the version
        if len(self._plans) >= _KEPT_PLANS:
            self._past_deviations += self._plans.pop(next(iter(self._plans))).deviations
        self._plans[plan.version, key] = plan
        return plan

    def _make(self, key: Hashable, steps: Sequence[ScheduledStep]) -> RoundPlan:
        executed = [(s.job.number, s.step.compiled, s.step.memory) for s in steps]
        names = [scheduled.job.name for scheduled in steps]
        for may_repack in (True, False):
            budget = self._budget_for([scheduled.job for scheduled in steps])
            for schedule in self._candidates((key, budget), steps, budget):
                plan = plan_round(self._arena, schedule, executed)
                if plan is not None:
                    self._schedules[key, budget] = schedule
                    self.texts.setdefault(schedule.describe(names))
                    return plan
            if may_repack:  # gaps between persistent tensors may be what is in the way
                self._residency.repack()
        raise BudgetError(
            f"jobs {', '.join(map(repr, names))} were admitted but find no place; tensors that "
            "user code keeps in the arena may be in the way"
        )

    def _budget_for(self, jobs: Sequence[JobRun]) -> int:
        """The arena's bytes less what others than these jobs hold."""
        statistics = self._arena.statistics()
        held = sum(int(self._arena.held(job.number)) for job in jobs)
        return int(statistics.capacity) - (int(statistics.live) - held)

    def _candidates(
        self, key: Hashable, steps: Sequence[ScheduledStep], budget: int
    ) -> Iterator[Schedule]:
        """The schedule that worked last, then new ones from the boldest to one after another."""
        if key in self._schedules:
            yield self._schedules[key]
        jobs = [self._plan_job(scheduled) for scheduled in steps]
        yield from schedules_to_try(self._policy, jobs, budget, self._lanes.lanes)

    def _plan_job(self, scheduled: ScheduledStep) -> PlanJob:
        held = int(self._arena.held(scheduled.job.number))
        step = scheduled.step
        profile = step.memory.profile.beside(persistent_bytes=held)
        return PlanJob(scheduled.job.name, profile, step.compiled.boundary or None)
