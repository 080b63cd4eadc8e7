"""Which two of some candidates train well together: `pair`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.study.estimate import SizedJob, estimate
from waterflow.study.hardware import Hardware, get_hardware
from waterflow.study.job_specs import JobSpecs, StudyJob, study_jobs
from waterflow.study.largest import largest_alone
from waterflow.study.results import Pair

#: Batches that are tried, as shares of what each job could have alone.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def pair(
    jobs: JobSpecs, memory: int | str, *, hardware: str | None = None, lanes: int = 2
) -> list[Pair]:
    """Which two of these candidates to co-train, and the batch for each; the best pair first.

    Args:
        jobs: candidates, as for `plan` or `max_batch`; one with a batch keeps it.
        memory: bytes that all jobs together may hold, or a text such as "32GiB".
        hardware: as for `plan`.
        lanes: node groups that may run at once.

    Raises:
        JobError: a job cannot be had or planned, or there are fewer than two.
        BudgetError: a candidate does not fit even alone.
    """
    budget = parse_bytes(memory)
    device = get_hardware(hardware)
    candidates = study_jobs(jobs, device)
    if len(candidates) < 2:
        raise JobError(f"a pair needs at least two candidates, got {len(candidates)}")
    largest = [largest_alone(candidate, budget) for candidate in candidates]
    pairs: list[Pair] = []
    for a, b in itertools.combinations(range(len(candidates)), 2):
        chosen = [candidates[a], candidates[b]]
        best = _best_shares(chosen, (largest[a], largest[b]), (a, b), budget, device, lanes)
        pairs += [best] if best is not None else []
    return sorted(pairs, key=lambda found: -found.speed)


def _best_shares(
    chosen: Sequence[StudyJob],
    largest: tuple[int | None, int | None],
    places: tuple[int, int],
    budget: int,
    device: Hardware,
    lanes: int,
) -> Pair | None:
    best: Pair | None = None
    alone = [
        _samples_per_second(job.sized_job(n), n) for job, n in zip(chosen, largest, strict=True)
    ]
    for share in _SHARES:
        batch = tuple(None if n is None else max(1, int(n * share)) for n in largest)
        sized = [job.sized_job(n) for job, n in zip(chosen, batch, strict=True)]
        found = estimate(sized, budget, "flow", device.alignment, lanes)
        if found is None:
            continue
        speed = sum(
            (1 if n is None else n) / found.seconds / rate
            for n, rate in zip(batch, alone, strict=True)
        )
        if best is None or speed > best.speed:
            names = (chosen[0].name, chosen[1].name)
            best = Pair(names, places, (batch[0], batch[1]), speed, found)
    return best


def _samples_per_second(sized_job: SizedJob, batch: int | None) -> float:
    return (1 if batch is None else batch) / sized_job.profile.seconds
