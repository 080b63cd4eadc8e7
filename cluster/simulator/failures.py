"""Nodes that fail and come back: exponential times between failures, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from waterflow.cluster.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class Failures:
    """How often nodes fail.

    Attributes:
        mean: seconds between two failures of a node, on average; inf: never.
        repair: seconds until it is back.
        checkpoint: seconds between two checkpoints of a job; what came after the last is lost.
        seed: of the random times.
    """

    mean: float = inf
    repair: float = 3600.0
    checkpoint: float = 1800.0
    seed: int = 0

    def first(self, cluster: ClusterSpec) -> Iterator[tuple[float, int]]:
        """When each node fails first."""
        if self.mean < inf:
            for node in range(len(cluster.nodes)):
                yield self.next(node, 0.0), node

    def next(self, node: int, now: float) -> float:
        """When a node fails next; depends on nothing but node, time and seed."""
        draw = random.Random(f"{self.seed}/{node}/{now!r}")
        return now + draw.expovariate(1.0 / self.mean)

    def lost(self, ran: float) -> float:
        """Seconds of work that are lost after so many since the last start."""
        return ran % self.checkpoint


NO_FAILURES = Failures()
