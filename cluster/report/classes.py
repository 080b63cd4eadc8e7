"""Results by class of jobs: small, medium and large ones, as in Amoeba's Table 2."""

from __future__ import annotations

import numpy as np

from waterflow.cluster.simulator.results import Results

#: GPU seconds: jobs below the first are small, above the second large (Amoeba, Table 2).
LIMITS = (1e4, 2e5)
NAMES = ("small", "medium", "large")


def average_by_size(found: Results) -> dict[str, tuple[int, float]]:
    """Jobs done and their average completion time in s, of all and of each class."""
    size = np.array([job.seconds * job.gpus for job in found.jobs])
    times = found.finish - found.submit
    kind = np.digitize(size, LIMITS)
    rows = {"all": _row(times)}
    rows |= {name: _row(times[kind == number]) for number, name in enumerate(NAMES)}
    claims = np.array([job.guaranteed for job in found.jobs])
    if not claims.all():
        rows |= {"guaranteed": _row(times[claims]), "opportunistic": _row(times[~claims])}
    return rows


def _row(times: np.ndarray) -> tuple[int, float]:
    done = times[~np.isnan(times)]
    return len(done), float(done.mean()) if len(done) else float("nan")
