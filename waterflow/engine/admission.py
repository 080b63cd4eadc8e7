"""Who may enter the arena: what fits alone, beside others, and shares nothing that is trained."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.engine.job_run import JobRun
from waterflow.executor.plan.need import fit_in_turn
from waterflow.executor.run.residency import Residency, storage_key


class Admission:
    """Decides on jobs by their exact needs: measured steps, rehearsed addresses."""

    def __init__(self, budget: int, capacity: int, residency: Residency) -> None:
        """Takes the budget as given, the arena's bytes (whole chunks), and who is in it."""
        self._budget = budget
        self._capacity = capacity
        self._residency = residency

    def check(self, member: JobRun, admitted: Sequence[JobRun]) -> None:
        """Whether the job may ever enter.

        Raises:
            BudgetError: it does not fit even alone.
            JobError: it shares a tensor with an admitted job and one of them trains it.
        """
        if not self.fits_alone(member):
            raise BudgetError(self._does_not_fit(member))
        self._check_sharing(member, admitted)

    def fits_alone(self, member: JobRun) -> bool:
        """Whether the job can run by itself."""
        return fit_in_turn([member.need], self._capacity)

    def fits_beside(self, member: JobRun, admitted: Sequence[JobRun]) -> bool:
        """Whether all fit at least one step after another, everybody's persistent tensors held."""
        return fit_in_turn([m.need for m in (*admitted, member)], self._capacity)

    def _does_not_fit(self, member: JobRun) -> str:
        need = member.need.alone_bytes
        return (
            f"job {member.name!r} needs {need} bytes ({format_bytes(need)}) to run alone, the "
            f"budget is {self._budget} bytes ({format_bytes(self._budget)}). Raise the budget or "
            "use a smaller batch."
        )

    def _check_sharing(self, member: JobRun, admitted: Sequence[JobRun]) -> None:
        """Jobs may read the same tensor; one that somebody trains has to be that job's own."""
        numbers = {m.number: m for m in admitted}
        trained = {storage_key(t) for m in admitted for t in m.preparer.mutated()}
        own = {storage_key(t) for t in member.preparer.mutated()}
        for tensor in member.preparer.all_persistent():
            others = self._residency.users(tensor) - {member.number}
            if others and storage_key(tensor) in trained | own:
                raise JobError(
                    f"jobs {numbers[min(others)].name!r} and {member.name!r} share a tensor of "
                    f"shape {tuple(tensor.shape)} that one of them changes: give each its own copy "
                    "of the model (copy.deepcopy) and an optimizer of that copy's parameters"
                )

    def too_small(self, members: Sequence[JobRun]) -> str:
        """What to say where some of these jobs do not fit even one after another."""
        needs = "; ".join(
            f"{m.name!r} needs {m.need.alone_bytes} bytes ({format_bytes(m.need.alone_bytes)})"
            for m in members
        )
        fitting = [repr(m.name) for m in members if self.fits_alone(m)]
        largest = max(m.need.alone_bytes for m in members)
        return (
            f"the budget of {self._budget} bytes ({format_bytes(self._budget)}) is too small even "
            f"for one job after another: {needs}. What would fit: jobs "
            f"{', '.join(fitting) or 'none'} under this budget, all of them under {largest} bytes "
            f"({format_bytes(largest)})."
        )
