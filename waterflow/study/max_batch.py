"""The largest batches that fit, alone and together: `max_batch`."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.study.estimate import STUDIED, PolicyEstimate, SizedJob, estimate, fits
from waterflow.study.hardware import Hardware, get_hardware
from waterflow.study.job_specs import JobSpecs, StudyJob, study_jobs
from waterflow.study.largest import largest_alone, largest_size
from waterflow.study.results import CoTrained, MaxBatch

#: Batches of a frontier, evenly up to the largest alone.
_POINTS = 12


def max_batch(
    jobs: JobSpecs,
    memory: int | str,
    *,
    hardware: str | None = None,
    lanes: int = 2,
    policies: Sequence[str] = tuple(STUDIED),
    frontier: bool = False,
) -> MaxBatch:
    """The largest batches that fit a budget: of each job alone, and of all together.

    Jobs of different kinds keep the proportion of their batches alone (Waterwave, Table 2).

    Args:
        jobs: as for `plan`, without batches; a job given twice trains beside itself.
        memory: bytes that all jobs together may hold, or a text such as "32GiB".
        hardware: as for `plan`.
        lanes: node groups that may run at once.
        policies: which to study.
        frontier: also how the overlap falls as the batches grow.

    Raises:
        JobError: a job cannot be had or planned, or its batch is fixed; says which and why.
        BudgetError: not even one sample fits.
    """
    budget = parse_bytes(memory)
    device = get_hardware(hardware)
    search = _Search(study_jobs(jobs, device), budget, device, lanes)
    together = {policy: search.together(policy) for policy in policies}
    return MaxBatch(
        memory_bytes=budget,
        hardware=device.name,
        names=tuple(job.name for job in search.jobs),
        solo=search.solo,
        policies=together,
        frontier={p: search.frontier(p, best) for p, best in together.items()} if frontier else {},
    )


class _Search:
    """The largest batches of some jobs under one budget."""

    def __init__(self, jobs: Sequence[StudyJob], budget: int, device: Hardware, lanes: int) -> None:
        self.jobs = jobs
        self._budget = budget
        self._device = device
        self._lanes = lanes
        for job in jobs:
            if job.is_fixed or job.batch is not None:
                raise JobError(
                    f"{job.name}: its batch is fixed. Give max_batch a model's name, or a "
                    "function from a batch size to a wf.Job"
                )
        found = [largest_alone(job, budget) for job in jobs]
        self.solo = tuple(size for size in found if size is not None)

    def batches(self, size: int) -> tuple[int, ...]:
        """Everybody's batch where that of the job with the largest is `size`."""
        largest = max(self.solo)
        return tuple(max(1, size * solo // largest) for solo in self.solo)

    def together(self, policy: str) -> CoTrained | None:
        """The largest batches that fit together."""

        def found(size: int) -> bool:
            return fits(self._sized(size), *self._under(policy))

        size = largest_size(found, max(self.solo))
        best = self._estimate(size, policy) if size else None
        if best is None:
            return None
        batch = self.batches(size)
        shares = [own / solo for own, solo in zip(batch, self.solo, strict=True)]
        return CoTrained(batch, sum(shares) / len(shares), best)

    def frontier(self, policy: str, best: CoTrained | None) -> list[tuple[float, float]]:
        """Overlap by batch: pairs of the ratio to the batch alone and the overlap. Simulated."""
        largest = max(self.solo)
        evenly = {max(1, largest * k // _POINTS) for k in range(2, _POINTS + 1)}
        sizes = sorted(evenly | ({max(best.batch)} if best is not None else set()))
        rows = [(size / largest, self._estimate(size, policy)) for size in sizes]
        return [(ratio, found.overlap) for ratio, found in rows if found is not None]

    def _estimate(self, size: int, policy: str) -> PolicyEstimate | None:
        return estimate(self._sized(size), *self._under(policy))

    def _sized(self, size: int) -> list[SizedJob]:
        batches = self.batches(size)
        return [job.sized_job(n) for job, n in zip(self.jobs, batches, strict=True)]

    def _under(self, policy: str) -> tuple[int, str, int, int]:
        return self._budget, policy, self._device.alignment, self._lanes
