"""Limits that are changed while jobs run: of one job, and the budget itself.

A job's steps are planned into its limit (`steps/spilling.py`); under a smaller budget the arena
shrinks at its end. All on the engine's thread, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import BudgetChanged, LimitChanged
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.need import fit_in_turn
from waterflow.job.job import Job
from waterflow.partitioner.policies.fair_share import Priority


class Limits:
    """Changes the limits of one engine and its jobs.

    Attributes:
        spills: whether jobs without a limit of their own are planned into the budget.
        imposed: bytes that jobs may need for others' sake, beside their own limits.
        is_learning: whether imposed limits are those of `MemoryTrials`, for nobody who goes first.
        before_change: called before somebody changes a limit.
    """

    def __init__(
        self, context: RunContext, queue: JobQueue, admission: Admission, takes_turns: bool
    ) -> None:
        """Args beyond the obvious.

        takes_turns: whether jobs that do not fit beside the others wait for their turn in memory.
        """
        self._context = context
        self._queue = queue
        self._admission = admission
        self._takes_turns = takes_turns
        self.spills = False
        self.imposed: WeakKeyDictionary[JobRun, int] = WeakKeyDictionary()
        self.is_learning = False
        # What jobs need without the imposed limit.
        self._full: WeakKeyDictionary[JobRun, int] = WeakKeyDictionary()
        self.before_change: Callable[[], None] = lambda: None

    def limit_job(self, job: JobRun, limit: int | None) -> None:
        """Gives a job another limit of its own.

        Args:
            job: the job.
            limit: bytes that it may need, taking its steps alone; None: no limit of its own.

        Raises:
            BudgetError: what one operator works on is more. Nothing has changed.
            JobError: it has ended, or its steps know no limit. Nothing has changed.
        """
        if job.ended:
            raise JobError(f"job {job.name!r} is {job.state.status} and has no limit any more")
        self.before_change()
        effective = self._effective(job.job, limit, self.imposed.get(job), self.capacity)
        self._set(job, effective)
        job.memory_limit = limit
        self._admission.somebody_left()
        self._context.events.publish(LimitChanged(job.name, limit))

    @property
    def capacity(self) -> int:
        """The arena's bytes."""
        return int(self._context.arena.statistics().capacity)

    def of_new(self, job: Job) -> int | None:
        """The bytes that a joining job's steps are planned into; None: whatever they need."""
        return self._effective(job, job.limit_bytes, None, self.capacity)

    def impose(self, job: JobRun, limit: int | None) -> None:
        """Has a job need less for others' sake; None: no longer. Between steps only.

        Raises:
            BudgetError, JobError: its steps cannot be planned into that. It has no such limit then.
        """
        full = self.full(job)
        try:
            self._set(job, self._effective(job.job, job.memory_limit, limit, self.capacity))
        except (BudgetError, JobError):
            self._lift(job)
            raise
        if limit is None:
            self._lift(job)
        else:
            self.imposed[job], self._full[job] = limit, full
            job.steps.spiller.is_lent = True

    def forget(self, job: JobRun) -> None:
        """Nothing is imposed on a job that has ended."""
        self.imposed.pop(job, None)
        self._full.pop(job, None)

    def full(self, job: JobRun) -> int:
        """The bytes that a job needs alone, or would without the limit imposed on it."""
        return self._full.get(job, job.needs.memory.alone_bytes)

    def _lift(self, job: JobRun) -> None:
        job.steps.spiller.is_lent = False
        self._full.pop(job, None)
        if self.imposed.pop(job, None) is not None and not job.ended:
            self._set(job, self._effective(job.job, job.memory_limit, None, self.capacity))

    def _set(self, job: JobRun, limit: int | None) -> None:
        """Plans a job's steps into another limit. Where it finds no room with more than it had, it
        rests until there is some."""
        former = job.steps.spiller.limit
        if limit == former and job.steps.spiller.problem is None:
            return
        job.set_limit(limit, self._context.residency)
        if not _fit([job], self.capacity):
            need = job.needs.memory.alone_bytes
            job.set_limit(former, self._context.residency)
            raise BudgetError(
                f"job {job.name!r}: without the limit of {former} it needs {need} bytes "
                f"({format_bytes(need)}) alone, the budget is {self.capacity} bytes "
                f"({format_bytes(self.capacity)}): raise the budget, or leave it a limit"
            )
        residents = [one for one in self._queue.jobs if one.resident and not one.ended]
        if job.resident and not _fit(residents, self.capacity):
            job.gives_way = True
            job.suspend(self._context.residency)

    def _effective(
        self, job: Job, own: int | None, imposed: int | None, capacity: int
    ) -> int | None:
        """The bytes that a job's steps are planned into, under a limit of its own, and one that is
        imposed."""
        limits = [limit for limit in (own, imposed) if limit is not None]
        if limits:
            return min(*limits, capacity)
        return capacity if self.spills and job.capture is not False else None

    def resize(self, budget: int) -> None:
        """Changes the budget.

        Raises:
            BudgetError: what is held does not fit. Nothing has changed.
            JobError: the device does not have so much. Nothing has changed.
        """
        arena = self._context.arena
        units = budget // int(arena.alignment) * int(arena.alignment)
        self.before_change()
        capacity = self.capacity
        former = self._plan_into(units)
        try:
            self._shrink_or_grow(budget, units)
        except (BudgetError, JobError):
            for job, limit in former.items():
                job.set_limit(limit, self._context.residency)
            raise
        for job in self._queue.everybody:
            job.most_capacity = max(job.most_capacity, capacity)
        self._admission.change_budget(budget, units)
        self._context.events.publish(BudgetChanged(budget))

    def _plan_into(self, capacity: int) -> dict[JobRun, int | None]:
        """Plans the steps of jobs that may spill into the new budget; returns their former limits.
        One for which there is no such plan keeps its own, and may turn out not to fit."""
        former: dict[JobRun, int | None] = {}
        for job in self._queue.everybody:
            known = job.steps.spiller.limit
            imposed = self.imposed.get(job)
            limit = self._effective(job.job, job.memory_limit, imposed, capacity)
            if job.ended or limit == known or limit is None:
                continue
            try:
                job.set_limit(limit, self._context.residency)
                former[job] = known
            except (BudgetError, JobError):
                continue
        return former

    def _shrink_or_grow(self, budget: int, units: int) -> None:
        arena = self._context.arena
        staying = self._staying(units, budget)
        for job in self._queue.jobs:
            if job.resident and not job.ended and job not in staying:
                job.gives_way = True
                job.suspend(self._context.residency)
        if units < int(arena.live_end):
            self._context.residency.repack()  # what is in the way moves down
        arena.synchronize()  # what lanes have given up at the end is one piece from here on
        if not arena.resize(units):
            raise self._refused(budget)

    def _staying(self, capacity: int, budget: int) -> list[JobRun]:
        """The jobs that stay in memory: all that cannot give way, and as many of the others as fit
        beside them, those that came first first."""
        residents = [job for job in self._queue.jobs if job.resident and not job.ended]
        staying = [job for job in residents if not self._may_give_way(job)]
        if staying and not _fit(staying, capacity):
            raise BudgetError(self._too_small(staying, budget))
        for job in residents:
            if job in staying:
                continue
            if _fit([*staying, job], capacity):
                staying.append(job)
            elif job.priority is not Priority.OPPORTUNISTIC and not _fit([job], capacity):
                raise BudgetError(self._too_small([job], budget))  # it would have no turn
        return staying

    def _may_give_way(self, job: JobRun) -> bool:
        if job.priority is Priority.OPPORTUNISTIC:
            return True
        return self._takes_turns and job.priority is not Priority.GUARANTEED

    def _too_small(self, jobs: Sequence[JobRun], budget: int) -> str:
        held = "; ".join(
            f"{job.name!r} holds {format_bytes(job.needs.memory.persistent_bytes)} and needs "
            f"{format_bytes(job.needs.memory.step_bytes)} for a step"
            for job in jobs
        )
        return (
            f"the budget cannot become {budget} bytes ({format_bytes(budget)}): {held}. Suspend or "
            "stop some of these jobs first, or make them opportunistic"
        )

    def _refused(self, budget: int) -> Exception:
        statistics = self._context.arena.statistics()
        if budget > int(statistics.capacity):
            return JobError(
                f"the budget cannot become {budget} bytes ({format_bytes(budget)}): "
                f"{self._context.lanes.device.name} does not have so much"
            )
        held = {job.name: int(self._context.arena.held(job.number)) for job in self._queue.jobs}
        names = ", ".join(f"{name!r}: {format_bytes(size)}" for name, size in held.items() if size)
        return BudgetError(
            f"the budget cannot become {budget} bytes ({format_bytes(budget)}): what is held lies "
            f"in the way and cannot be moved ({names})"
        )


def _fit(jobs: Sequence[JobRun], capacity: int) -> bool:
    return fit_in_turn([job.needs.memory for job in jobs], capacity)
