"""What `plan`, `max_batch` and `pair` answer: values, also as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from waterflow.study.estimate import PolicyEstimate, SizedJob


@dataclass(frozen=True)
class PlannedJob:
    """A job of a plan: bytes that it holds all the time, and the least it needs to run alone."""

    name: str
    batch: int | None
    persistent_bytes: int
    solo_bytes: int
    source: str
    priority: str = "normal"
    weight: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Whether jobs fit a budget together, and what each policy makes of them.

    Attributes:
        memory_bytes: the budget.
        hardware: whose times are estimated.
        jobs: what each needs.
        policies: by name; None where the policy does not fit them.
        first: the names of those that a run lets in at first, in that order.
        waiting: of those that wait for room until others have ended.
        refused: of those that do not fit even alone.
    """

    memory_bytes: int
    hardware: str
    jobs: tuple[PlannedJob, ...]
    policies: dict[str, PolicyEstimate | None]
    subjects: tuple[SizedJob, ...] = field(repr=False, compare=False, default=())
    first: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

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
                name: None if found is None else {**_summary(found), "speeds": list(found.speeds)}
                for name, found in self.policies.items()
            },
            "first": list(self.first),
            "waiting": list(self.waiting),
            "refused": list(self.refused),
            "simulated": ["overlap", "seconds", "speedup", "speeds"],
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


def _summary(found: PolicyEstimate) -> dict[str, Any]:
    return {
        "peak_bytes": found.peak_bytes,
        "syncs_per_step": found.syncs_per_step,
        "overlap": found.overlap,
        "seconds": found.seconds,
        "speedup": found.speedup,
    }
