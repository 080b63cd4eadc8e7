"""The budget itself, changed while jobs run: the arena grows and shrinks at its end."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import BudgetChanged
from waterflow.engine.in_flight import StepsInFlight
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.need import fit_in_turn
from waterflow.partitioner.policies.fair_share import Priority


class Resizer:
    """Grants wishes for another budget. On the engine's thread, between steps."""

    def __init__(
        self,
        context: RunContext,
        queue: JobQueue,
        admission: Admission,
        in_flight: StepsInFlight,
    ) -> None:
        self._context = context
        self._queue = queue
        self._admission = admission
        self._in_flight = in_flight

    def grant(self) -> None:
        """Grants, or refuses, what was asked for since."""
        while (wish := self._queue.next_resize()) is not None:
            try:
                self._in_flight.complete_all()
                self._context.arena.synchronize()
                self._resize(wish.budget)
            except (BudgetError, JobError) as error:
                wish.error = error
            wish.done.set()

    def _resize(self, budget: int) -> None:
        """
        Raises:
            BudgetError: what lives does not fit.
            JobError: the device does not have so much.
        """
        arena = self._context.arena
        units = budget // int(arena.alignment) * int(arena.alignment)
        staying = self._staying(units, budget)
        for job in self._queue.jobs:
            if job.resident and not job.ended and job not in staying:
                job.gives_way = True
                job.suspend(self._context.residency)
        if units < int(arena.live_end):
            self._context.residency.repack()  # what is in the way moves down
        if not arena.resize(units):
            raise self._refused(budget)
        self._admission.change_budget(budget, units)
        self._context.events.publish(BudgetChanged(budget))
        self._context.wake()

    def _staying(self, capacity: int, budget: int) -> list[JobRun]:
        """The jobs that stay in memory: all that are not opportunistic, and as many of the others
        as fit beside them, those that came first first."""
        residents = [job for job in self._queue.jobs if job.resident and not job.ended]
        first = [job for job in residents if job.priority is not Priority.OPPORTUNISTIC]
        if first and not _fit(first, capacity):
            raise BudgetError(self._too_small(first, budget))
        staying = list(first)
        for job in residents:
            if job not in staying and _fit([*staying, job], capacity):
                staying.append(job)
        return staying

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
