"""Speeds of pairs from `waterflow pair --json`: what the planner says fits together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from waterflow.cluster.simulator.measured import Measured
from waterflow.cluster.spec import JobSpec
from waterflow.common.errors import JobError


class Paired(Measured):
    """Measured speeds, but those of some pairs of models are given."""

    def __init__(self, pairs: Mapping[tuple[str, str], float]) -> None:
        self._pairs = {tuple(sorted(names)): speed for names, speed in pairs.items()}

    def shared(self, spec: JobSpec, other: JobSpec) -> float:
        """See `Speeds`: the two together do `speed` times what turns would, each the half of it."""
        found = self._pairs.get(tuple(sorted((spec.model, other.model))))
        return super().shared(spec, other) if found is None else min(found / 2.0, 1.0)


def read_pairs(path: Path) -> Paired:
    """What `waterflow pair JOB... --json` has written; names are the models of the trace.

    Raises:
        JobError: it is not such a file.
    """
    try:
        rows = json.loads(path.read_text())
        pairs = {(str(a), str(b)): float(row["speed"]) for row in rows for a, b in [row["names"]]}
        if not pairs or min(pairs.values()) <= 0:
            raise ValueError("no pair, or one without speed")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"{path} has no pairs ({type(error).__name__}: {error}); give what "
            "`waterflow pair JOB JOB --memory 16GiB --json` prints"
        ) from error
    return Paired(pairs)
