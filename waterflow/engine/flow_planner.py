"""Plans flow: how the captured steps of jobs are piled up, in the memory that is left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.flow_plan import Flowing, FlowPlan
from waterflow.executor.plan.headroom import FlowJob, choose_headroom
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.partitioner.policies import Policy
from waterflow.steps.prepared import PreparedStep


class FlowPlanner:
    """Makes the plan of jobs that flow, and keeps it for as long as the arena is as it found it."""

    def __init__(self, policy: Policy, lanes: Lanes, residency: Residency) -> None:
        self._policy = policy
        self._lanes = lanes
        self._arena = lanes.arena
        self._residency = residency
        self._plan: FlowPlan | None = None
        self._key: Hashable = None
        self._past = (0, 0)  # waits and deviations of former plans
        self._past_seconds = 0.0  # waited under former plans

    @property
    def waits(self) -> int:
        """How often a node group has waited for memory that the other lane held."""
        return self._past[0] + (int(self._plan.gate.waits) if self._plan else 0)

    @property
    def waited_seconds(self) -> float:
        """How long lanes have waited for such memory, of all of them together."""
        return self._past_seconds + (float(self._plan.gate.waited_seconds) if self._plan else 0.0)

    @property
    def deviations(self) -> int:
        """Requests for memory that were not as profiled."""
        return self._past[1] + (self._plan.deviations if self._plan else 0)

    def plan(self, jobs: Sequence[JobRun]) -> FlowPlan | None:
        """The plan for the captured steps of these jobs; None where there are none, or no room."""
        steps = [(job, step) for job in jobs for step in job.captured.steady]
        among = tuple(step for _, step in steps)
        is_over = self._plan is not None and self._plan.is_over
        if is_over or (int(self._arena.version), among) != self._key:
            self._past = (self.waits, self.deviations)
            self._past_seconds = self.waited_seconds
            self._plan = None
            self._plan = self._make(steps) if steps else None  # it may move things
            self._key = int(self._arena.version), among
        return self._plan

    def _make(self, steps: Sequence[tuple[JobRun, PreparedStep]]) -> FlowPlan | None:
        lowest = max(step.memory.extent for _, step in steps)
        if lowest > self._room():
            self._residency.repack()  # gaps between persistent tensors may be what is in the way
        room = self._room()
        lanes, next_job = self._lanes.lanes, self._policy.next_job
        choice = choose_headroom(_flow_jobs(steps), room, lanes, next_job)
        if choice is None:
            return None
        flowing = [
            (
                Flowing(job.number, step.compiled, step.memory, job.throttle),
                step.piles.at(choice.headroom, room),
            )
            for job, step in steps
        ]
        return FlowPlan(self._arena, lanes, flowing)

    def _room(self) -> int:
        return int(self._arena.statistics().capacity) - int(self._arena.live_end)


def _flow_jobs(steps: Sequence[tuple[JobRun, PreparedStep]]) -> list[FlowJob]:
    by_job: dict[JobRun, list[Piles]] = {}
    for job, step in steps:
        by_job.setdefault(job, []).append(step.piles)
    return [FlowJob(piles, job.weight, job.priority) for job, piles in by_job.items()]
