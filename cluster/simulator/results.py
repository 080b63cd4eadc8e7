"""What a simulation found: arrays by job, and series over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from waterflow.cluster.spec import JobSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Results:
    """One policy on one trace. Times are seconds since the trace's begin.

    Arrays by job, in the trace's order: `name`, `submit`, `gpus`, `start` (nan: never), `finish`
    (nan: not done), `service` (GPU seconds), `preemptions`, `migrations`, `resizes`,
    `opportunistic` (seconds that it ran as such). Series with one entry for each decision: `times`,
    `gpus_in_use`, `queue_length`. `gpus_over_time` has a job's (time, GPUs) whenever they changed.

    `finished` is False where the run was `interrupted`, or where the policy never starts some.
    """

    policy: str
    jobs: tuple[JobSpec, ...]
    name: NDArray[np.str_]
    submit: Floats
    gpus: Ints
    start: Floats
    finish: Floats
    service: Floats
    preemptions: Ints
    migrations: Ints
    resizes: Ints
    opportunistic: Floats
    times: Floats
    gpus_in_use: Ints
    queue_length: Ints
    gpus_over_time: dict[int, list[tuple[float, int]]] = field(repr=False)
    events: int = 0
    seconds_simulating: float = 0.0
    finished: bool = True
    interrupted: bool = False

    @property
    def completion_times(self) -> Floats:
        """Seconds from submission to completion of the jobs that are done."""
        done = ~np.isnan(self.finish)
        return self.finish[done] - self.submit[done]

    @property
    def average_jct(self) -> float:
        """Mean completion time; nan if none is done."""
        found = self.completion_times
        return float(found.mean()) if len(found) else float("nan")

    @property
    def p99_jct(self) -> float:
        """The completion time that 99 of 100 jobs stay below."""
        found = self.completion_times
        return float(np.percentile(found, 99)) if len(found) else float("nan")

    @property
    def makespan(self) -> float:
        """When the last job is done, counted from time 0 of the trace."""
        return float(np.nanmax(self.finish)) if len(self.completion_times) else float("nan")

    def summary(self) -> dict[str, float | int]:
        """The figures of the command line's --json."""
        return {
            "average_jct": self.average_jct,
            "p99_jct": self.p99_jct,
            "makespan": self.makespan,
            "preemptions": int(self.preemptions.sum()),
            "migrations": int(self.migrations.sum()),
            "jobs": len(self.completion_times),
            "seconds_simulating": round(self.seconds_simulating, 3),
        }
