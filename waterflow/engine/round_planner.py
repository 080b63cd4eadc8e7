"""Plans rounds: asks the policy for schedules and rehearses them until one has addresses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence

from waterflow.common.errors import BudgetError
from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.round_plan import RoundPlan, layout_key, plan_round
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.partitioner import PlanJob, Policy, get_policy
from waterflow.partitioner.schedule import Schedule
from waterflow.steps.prepared import PreparedStep

#: A schedule that the rehearsal refuses is sought again under a smaller budget.
_TIGHTER = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65)
#: Plans kept; more layouts than this mean that something moves in every round.
_KEPT_PLANS = 64

Turn = tuple[JobRun, PreparedStep]


def candidates(
    policy: Policy, jobs: Sequence[PlanJob], budget: int, lanes: int
) -> Iterator[Schedule]:
    """Schedules to rehearse one after another, from the boldest; a policy's last is the safest."""
    with contextlib.suppress(BudgetError):
        for share in _TIGHTER:
            yield policy.schedule(jobs, int(budget * share), lanes)
    if not policy.published:
        with contextlib.suppress(BudgetError):
            yield get_policy("temporal").schedule(jobs, budget, lanes)


class RoundPlanner:
    """Makes the plan of a round, and keeps it while the arena's persistent part stays as it is."""

    def __init__(self, policy: Policy, lanes: Lanes, residency: Residency) -> None:
        self._policy = policy
        self._lanes = lanes
        self._arena = lanes.arena
        self._residency = residency
        self._layout: int | None = None
        self._plans: dict[Hashable, RoundPlan] = {}
        self._schedules: dict[Hashable, Schedule] = {}
        self._past_deviations = 0
        self.texts: dict[str, None] = {}  # the schedules used, for the report

    @property
    def deviations(self) -> int:
        """Requests for memory so far that were not as planned."""
        return self._past_deviations + sum(plan.deviations for plan in self._plans.values())

    def moved(self) -> None:
        """Something persistent has come, gone or moved."""
        self._layout = None

    def plan(self, turns: Sequence[Turn]) -> RoundPlan:
        """The plan for one step of each job.

        Raises:
            BudgetError: not even one after another fits; what user code keeps is in the way.
        """
        if self._layout is None:
            self._layout = layout_key(self._arena)
        steps = tuple((member.number, id(step)) for member, step in turns)
        if (self._layout, steps) not in self._plans:
            plan = self._make(steps, turns)  # it may move things, and so change the layout
            if len(self._plans) >= _KEPT_PLANS:
                self._past_deviations += self._plans.pop(next(iter(self._plans))).deviations
            self._plans[self._layout, steps] = plan
        return self._plans[self._layout, steps]

    def _make(self, steps: Hashable, turns: Sequence[Turn]) -> RoundPlan:
        executed = [(m.number, step.compiled, step.memory) for m, step in turns]
        for may_repack in (True, False):
            budget = self._budget_for([member for member, _ in turns])
            for schedule in self._candidates((steps, budget), turns, budget):
                plan = plan_round(self._arena, schedule, executed)
                if plan is not None:
                    self._schedules[steps, budget] = schedule
                    self.texts.setdefault(schedule.describe([m.name for m, _ in turns]))
                    return plan
            if may_repack:  # gaps between persistent tensors may be what is in the way
                self._residency.repack()
                self._layout = layout_key(self._arena)
        names = ", ".join(repr(m.name) for m, _ in turns)
        raise BudgetError(
            f"jobs {names} were admitted but find no place; tensors that user code keeps in the "
            "arena may be in the way"
        )

    def _budget_for(self, members: Sequence[JobRun]) -> int:
        """The arena's bytes less what others than these jobs hold."""
        statistics = self._arena.statistics()
        held = sum(int(self._arena.held(member.number)) for member in members)
        return int(statistics.capacity) - (int(statistics.live) - held)

    def _candidates(self, key: Hashable, turns: Sequence[Turn], budget: int) -> Iterator[Schedule]:
        """The schedule that worked last, then new ones from the boldest to one after another."""
        if key in self._schedules:
            yield self._schedules[key]
        jobs = [self._plan_job(member, step) for member, step in turns]
        yield from candidates(self._policy, jobs, budget, self._lanes.lanes)

    def _plan_job(self, member: JobRun, step: PreparedStep) -> PlanJob:
        held = int(self._arena.held(member.number))
        profile = dataclasses.replace(step.memory.profile, persistent_bytes=held)
        return PlanJob(member.name, profile, step.compiled.boundary or None)
