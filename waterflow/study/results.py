"""Will it fit, and how fast: `plan`, `max_batch` and `pair`. Nothing is trained for an answer.

Steps are captured with tensors that have shapes but no memory; the real allocator decides on
virtual addresses. See `estimate` for what is exact and what is simulated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes, parse_bytes
from waterflow.job.job import Job
from waterflow.study.estimate import STUDIED, PolicyEstimate, SizedJob, estimate, fits, fits_in_turn
from waterflow.study.hardware import Hardware, get_hardware
from waterflow.study.job_specs import JobFactory, StudyJob, candidates_of

#: No search goes beyond this batch: sizes stay within what 64 bits count.
_LARGEST_BATCH = 1 << 30
#: Batches that `pair` tries, as shares of what each job could have alone.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
#: Batches of a frontier, evenly up to the largest alone.
_POINTS = 12

JobSpecs = Sequence[str | Job | JobFactory]


@dataclass(frozen=True)
class PlannedJob:
    """A job of a plan: bytes that it holds all the time, and the least it needs to run alone."""

    name: str
    batch: int | None
    persistent_bytes: int
    solo_bytes: int
    source: str


@dataclass(frozen=True)
class Plan:
    """Whether jobs fit a budget together, and what each policy makes of them.

    Attributes:
        memory_bytes: the budget.
        hardware: whose times are estimated.
        jobs: what each needs.
        policies: by name; None where the policy does not fit them.
    """

    memory_bytes: int
    hardware: str
    jobs: tuple[PlannedJob, ...]
    policies: dict[str, PolicyEstimate | None]
    subjects: tuple[SizedJob, ...] = field(repr=False, compare=False, default=())

    @property
    def fits(self) -> bool:
        """Whether the jobs fit at all, be it one after another."""
        return any(self.policies.values())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "hardware": self.hardware,
            "jobs": [dict(vars(job)) for job in self.jobs],
            "policies": {
                name: None if found is None else _summary(found)
                for name, found in self.policies.items()
            },
            "simulated": ["overlap", "seconds", "speedup"],
        }

    def to_json(self) -> str:
        """The plan as one JSON document."""
        return json.dumps(self.to_dict())


@dataclass(frozen=True)
class CoTrained:
    """The largest batches of jobs that train together under one policy.

    Attributes:
        batch: per job.
        ratio: what they are of the batches that each could have alone, in the mean.
        outlook: what the policy makes of them.
    """

    batch: tuple[int, ...]
    ratio: float
    outlook: PolicyEstimate = field(repr=False)


@dataclass(frozen=True)
class MaxBatch:
    """The largest batches that fit a budget, alone and together.

    Attributes:
        memory_bytes: the budget.
        hardware: whose times are estimated.
        names: the jobs.
        solo: the largest batch of each alone.
        policies: by name; None where not even one sample of each fits.
    """

    memory_bytes: int
    hardware: str
    names: tuple[str, ...]
    solo: tuple[int, ...]
    policies: dict[str, CoTrained | None]
    frontier: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        jobs = [{"name": name, "solo": solo} for name, solo in zip(self.names, self.solo)]  # noqa: B905
        policies: dict[str, Any] = {}
        for name, found in self.policies.items():
            policies[name] = None
            if found is not None:
                summary = _summary(found.outlook)
                policies[name] = {"batch": list(found.batch), "ratio": found.ratio, **summary}
        result: dict[str, Any] = {
            "memory_bytes": self.memory_bytes,
            "hardware": self.hardware,
            "jobs": jobs,
            "policies": policies,
            "simulated": ["overlap", "seconds", "speedup"],
        }
        if self.frontier:
            result["frontier"] = self.frontier
        return result

    def to_json(self) -> str:
        """The result as one JSON document."""
        return json.dumps(self.to_dict())


@dataclass(frozen=True)
class Pair:
    """Two candidates that would train well together.

    Attributes:
        names: of the candidates.
        places: where they stand in the list that was given.
        batch: for each; None for a job whose batch is fixed.
        speed: samples per second of both, each as a share of its own best alone, added up: 1.0 is
            what taking turns at the largest batches gives. Simulated.
        outlook: what the policy `flow` makes of them.
    """

    names: tuple[str, str]
    places: tuple[int, int]
    batch: tuple[int | None, int | None]
    speed: float
    outlook: PolicyEstimate = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The pair as plain values."""
        return {
            "names": list(self.names),
            "places": list(self.places),
            "batch": list(self.batch),
            "speed": self.speed,
            **_summary(self.outlook),
            "simulated": ["speed", "overlap", "seconds", "speedup"],
        }


def plan(
    jobs: JobSpecs,
    memory: int | str,
    *,
    hardware: str = "v100",
    lanes: int = 2,
    measure: bool = False,
) -> Plan:
    """Whether these jobs fit a budget together, and what each policy makes of them.

    Args:
        jobs: zoo models with a batch ("resnet50:batch=160"), factories in files with a batch
            ("models.py:make_job:batch=8"), files of jobs ("jobs.py"), or jobs (`wf.Job`).
        memory: bytes that all jobs together may hold, or a text such as "32GiB".
        hardware: "v100", "p100", "a100", "h100", "h200" or "cpu": its alignment counts, and its
            peak rates give estimated times.
        lanes: node groups that may run at once.
        measure: run each step of jobs that are given as jobs once or twice on copies, on the CPU:
            with hardware="cpu" memory is then that of a run on this machine, to the byte.

    Raises:
        JobError: a job cannot be had or planned; says which and why.
    """
    budget = parse_bytes(memory)
    device = get_hardware(hardware)
    found = candidates_of(jobs, device, measure)
    for candidate in found:
        if candidate.batch is None and not candidate.is_fixed:
            name = candidate.name
            raise JobError(f"{name}: which batch? Write {name}:batch=32, or ask max_batch")
    sized = [candidate.sized_job(candidate.batch) for candidate in found]
    return Plan(
        memory_bytes=budget,
        hardware=device.name,
        jobs=tuple(_planned(c, s) for c, s in zip(found, sized, strict=True)),
        policies={
            policy: estimate(sized, budget, policy, device.alignment, lanes) for policy in STUDIED
        },
        subjects=tuple(sized),
    )


def max_batch(
    jobs: JobSpecs,
    memory: int | str,
    *,
    hardware: str = "v100",
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
    search = _Search(candidates_of(jobs, device), budget, device, lanes)
    together = {policy: search.together(policy) for policy in policies}
    return MaxBatch(
        memory_bytes=budget,
        hardware=device.name,
        names=tuple(candidate.name for candidate in search.candidates),
        solo=search.solo,
        policies=together,
        frontier={p: search.frontier(p, best) for p, best in together.items()} if frontier else {},
    )


def pair(
    jobs: JobSpecs, memory: int | str, *, hardware: str = "v100", lanes: int = 2
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
    candidates = candidates_of(jobs, device)
    if len(candidates) < 2:
        raise JobError(f"a pair needs at least two candidates, got {len(candidates)}")
    largest = [_largest_alone(candidate, budget) for candidate in candidates]
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
    alone = [_samples_per_second(c.sized_job(n), n) for c, n in zip(chosen, largest, strict=True)]
    for share in _SHARES:
        batch = tuple(None if n is None else max(1, int(n * share)) for n in largest)
        sized = [c.sized_job(n) for c, n in zip(chosen, batch, strict=True)]
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


class _Search:
    """The largest batches of some candidates under one budget."""

    def __init__(
        self, candidates: Sequence[StudyJob], budget: int, device: Hardware, lanes: int
    ) -> None:
        self.candidates = candidates
        self._budget = budget
        self._device = device
        self._lanes = lanes
        for candidate in candidates:
            if candidate.is_fixed or candidate.batch is not None:
                raise JobError(
                    f"{candidate.name}: its batch is fixed. Give max_batch a model's name, or a "
                    "function from a batch size to a wf.Job"
                )
        found = [_largest_alone(candidate, budget) for candidate in candidates]
        self.solo = tuple(size for size in found if size is not None)

    def batches(self, size: int) -> tuple[int, ...]:
        """Everybody's batch where that of the job with the largest is `size`."""
        largest = max(self.solo)
        return tuple(max(1, size * solo // largest) for solo in self.solo)

    def together(self, policy: str) -> CoTrained | None:
        """The largest batches that fit together."""

        def found(size: int) -> bool:
            return fits(self._subjects(size), *self._under(policy))

        size = _largest(found, max(self.solo))
        best = self._outlook(size, policy) if size else None
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
        rows = [(size / largest, self._outlook(size, policy)) for size in sizes]
        return [(ratio, found.overlap) for ratio, found in rows if found is not None]

    def _outlook(self, size: int, policy: str) -> PolicyEstimate | None:
        return estimate(self._subjects(size), *self._under(policy))

    def _subjects(self, size: int) -> list[SizedJob]:
        batches = self.batches(size)
        return [c.sized_job(n) for c, n in zip(self.candidates, batches, strict=True)]

    def _under(self, policy: str) -> tuple[int, str, int, int]:
        return self._budget, policy, self._device.alignment, self._lanes


def _largest_alone(candidate: StudyJob, budget: int) -> int | None:
    """The largest batch with which it fits alone; None where its batch is fixed.

    Raises BudgetError where not even one sample fits, or not what was asked for.
    """
    if candidate.is_fixed or candidate.batch is not None:
        _check_alone(candidate, candidate.batch, budget)
        return candidate.batch
    found = _largest(lambda size: fits_in_turn([candidate.sized_job(size)], budget), None)
    if not found:
        _check_alone(candidate, 1, budget)
    return found


def _check_alone(candidate: StudyJob, batch: int | None, budget: int) -> None:
    first = candidate.sized_job(batch)
    if first.solo_bytes > budget:
        what = "it" if batch is None else f"a batch of {batch}"
        raise BudgetError(
            f"{candidate.name}: {what} needs {first.solo_bytes} bytes "
            f"({format_bytes(first.solo_bytes)}) alone, the budget is {budget} bytes "
            f"({format_bytes(budget)}). Raise the budget, or use a smaller model"
        )


def _largest(fits: Callable[[int], bool], bound: int | None) -> int:
    """The largest size that fits, where every smaller one does; 0 if there is none.

    Fragmentation may break that rule near the border: one that does not fit below one that does
    is not looked for. A batch of one is asked for last: it is of a shape of its own to a family.
    """
    low, high = 0, 2
    for high in _doubling(bound):
        if not fits(high):
            break
        low = high
    else:
        return low
    if low == 0 and bound is None:
        return int(fits(1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _doubling(bound: int | None) -> Iterator[int]:
    """Sizes to try, up to the bound: from the bound down costs least where there is one."""
    if bound is not None:
        yield from (bound,)
        return
    size = 2
    while size < _LARGEST_BATCH:
        yield size
        size *= 2
    raise JobError(f"a batch of {_LARGEST_BATCH} fits still: does the model depend on the batch?")


def _planned(candidate: StudyJob, sized_job: SizedJob) -> PlannedJob:
    return PlannedJob(
        name=candidate.name,
        batch=candidate.batch,
        persistent_bytes=sized_job.persistent_bytes,
        solo_bytes=sized_job.solo_bytes,
        source=sized_job.profile.source,
    )


def _summary(found: PolicyEstimate) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_bytes,
        "syncs_per_step": found.syncs_per_step,
        "overlap": found.overlap,
        "seconds": found.seconds,
        "speedup": found.speedup,
    }
