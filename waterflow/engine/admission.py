"""Who may enter the arena: what fits alone, beside others, and shares nothing that is trained.

Jobs wait in the order of their submission; one that does not fit is asked again when somebody has
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.engine.job_run import Enough, JobRun
from waterflow.executor.device.storages import storage_key
from waterflow.executor.plan.need import MemoryNeed, fit_in_turn
from waterflow.executor.run.residency import Residency
from waterflow.steps.prepared import PreparedBatch


class Admission:
    """Decides on jobs by their exact needs: measured steps, rehearsed addresses."""

    def __init__(self, budget: int, capacity: int, residency: Residency) -> None:
        """Takes the budget as given, the arena's bytes (whole chunks), and who is in it."""
        self._budget = budget
        self._capacity = capacity
        self._residency = residency
        self._waiting: WeakSet[JobRun] = WeakSet()  # have been asked since somebody left

    def is_waiting(self, job: JobRun) -> bool:
        """Whether it is known that the job has no room for now."""
        return job in self._waiting

    def wait(self, job: JobRun) -> None:
        """The job has no room until somebody leaves."""
        self._waiting.add(job)

    def somebody_left(self) -> None:
        """There is room again, perhaps."""
        self._waiting.clear()

    def change_budget(self, budget: int, capacity: int) -> None:
        """Another budget, and the arena's bytes; whoever waits is asked again."""
        self._budget, self._capacity = budget, capacity
        self._waiting.clear()

    def check(self, job: JobRun, admitted: Sequence[JobRun]) -> None:
        """Whether the job may ever enter.

        Raises:
            BudgetError: it does not fit even alone, or not into its own limit.
            JobError: it shares a tensor with an admitted job and one of them trains it.
        """
        job.check_limit()
        if not self.fits_alone(job):
            raise BudgetError(self._does_not_fit(job))
        self._check_sharing(job, admitted)

    def fits_alone(self, job: JobRun) -> bool:
        """Whether the job can run by itself."""
        return fit_in_turn([job.needs.memory], self._capacity)

    def lacks_budget(self, job: JobRun) -> bool:
        """Whether the job could run by itself under a budget that it has known, but not now."""
        return not self.fits_alone(job) and fit_in_turn([job.needs.memory], job.most_capacity)

    def fits_beside(self, job: JobRun, admitted: Sequence[MemoryNeed]) -> bool:
        """Whether a job fits beside those with these needs, at least one step after another,
        everybody's persistent tensors held."""
        return fit_in_turn([*admitted, job.needs.memory], self._capacity)

    def _does_not_fit(self, job: JobRun) -> str:
        enough = job.enough_bytes()
        return (
            f"job {job.name!r} needs {enough.text} to run alone, the "
            f"budget is {self._budget} bytes ({format_bytes(self._budget)}). Raise the budget or "
            f"use a smaller batch.{job.why_unspilled}"
        )

    def _check_sharing(self, job: JobRun, admitted: Sequence[JobRun]) -> None:
        """Jobs may read the same tensor; one that somebody trains has to be that job's own."""
        away = [
            (m.number, {storage_key(t) for t in m.steps.persistent.all_away()})
            for m in admitted
            if m.steps.persistent.away
        ]
        own = [*job.steps.persistent.all(), *job.steps.persistent.all_away()]
        shared = [
            (t, (self._residency.users(t) | {n for n, keys in away if storage_key(t) in keys}))
            for t in own
        ]
        shared = [(tensor, users - {job.number}) for tensor, users in shared]
        shared = [(tensor, others) for tensor, others in shared if others]
        if not shared:
            return
        numbers = {m.number: m for m in admitted}
        changed = {storage_key(t) for m in (*admitted, job) for t in m.steps.cache.written()}
        for tensor, others in shared:
            if storage_key(tensor) in changed:
                raise JobError(
                    f"jobs {numbers[min(others)].name!r} and {job.name!r} share a tensor of "
                    f"shape {tuple(tensor.shape)} that one of them changes, or may change: give "
                    "each its own copy of the model (copy.deepcopy) and an optimizer of that "
                    "copy's parameters"
                )

    def too_small(self, jobs: Sequence[JobRun]) -> str:
        """What to say where some of these jobs do not fit even one after another."""
        problems = [str(m.steps.spiller.problem) for m in jobs if m.steps.spiller.problem]
        if problems:  # the smallest that spilling can do, too
            return " ".join(problems)
        enough = {m.name: m.enough_bytes() for m in jobs}
        needs = "; ".join(f"{name!r} needs {need.text}" for name, need in enough.items())
        fitting = [repr(m.name) for m in jobs if enough[m.name].size <= self._capacity]
        known = all(m.knows_batches for m in jobs)
        later = "" if known else " Larger batches that come later need more."
        return (
            f"the budget of {self._budget} bytes ({format_bytes(self._budget)}) is too small even "
            f"for one job after another: {needs}. What would fit: jobs "
            f"{', '.join(fitting) or 'none'} under this budget, all of them under "
            f"{self._for_all(jobs, list(enough.values())).text}.{later}"
        )

    def no_place(
        self, job: JobRun, batch: PreparedBatch, others: Sequence[JobRun], cause: BudgetError
    ) -> BudgetError:
        """What to raise where a job that was let in finds no place for its step: a batch of another
        shape needs more than those before it."""
        need = job.enough_bytes(batch)
        beside = [other.enough_bytes() for other in others if other is not job]
        size = sum(enough.size for enough in (need, *beside))
        whole = Enough(size, all(enough.is_known for enough in (need, *beside)))
        among = " beside the others" if beside else ""
        error = BudgetError(
            f"job {job.name!r}: the step on its present batch needs more than the first ones, and "
            f"finds no place{among} in the budget of {self._budget} bytes "
            f"({format_bytes(self._budget)}): give the run memory={whole.text}, or smaller batches"
        )
        error.__cause__ = cause
        return error

    def _for_all(self, jobs: Sequence[JobRun], enough: Sequence[Enough]) -> Enough:
        """A budget for all of these jobs. Those that wait for room are let in by their exact needs;
        where somebody's eager steps may need more than is known then, all fit side by side."""
        exact = all(m.needs.memory.alone_bytes == e.size for m, e in zip(jobs, enough, strict=True))
        sizes = [need.size for need in enough]
        return Enough(max(sizes) if exact else sum(sizes), all(need.is_known for need in enough))
