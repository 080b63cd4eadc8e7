"""How fast jobs are: alone, on more or fewer GPUs, over nodes, and beside each other."""

from __future__ import annotations

from waterflow.cluster.spec import JobSpec


class Plain:
    """As submitted: GPUs count linearly, distance for nothing, two on a GPU halve each other."""

    def step_time(self, spec: JobSpec, gpus: int, nodes: int) -> float:
        """See `Speeds`."""
        return spec.step_seconds if gpus == spec.gpus else spec.step_seconds * spec.gpus / gpus

    def shared(self, spec: JobSpec, other: JobSpec) -> float:
        """See `Speeds`."""
        return 0.5
