"""A GPU that is not there: jobs train on host tensors, but memory, streams, events and copies are
those of the fake driver, which executes them late and out of step.

Each node group is queued as one host function on its lane's stream. So a missing wait between
streams, a batch overwritten too early or a block handed out too soon changes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

import waterflow as wf
from tests.support import fake_cuda
from tests.support.jobs import MODELS as JOBS
from waterflow.executor.device.cuda import CudaDevice
from waterflow.partitioner.groups import cut_at
from waterflow.partitioner.policies.base import PlanJob, Policy
from waterflow.partitioner.schedule import GroupRef, Schedule, planned_peak


class FakeCudaDevice(CudaDevice):
    """The CUDA device without the parts that need torch's own CUDA library."""

    host_functions = True
    identity = "fake"

    def __init__(self, index: int | None = None) -> None:
        self.library = str(fake_cuda.library())
        super().__init__(index)

    def _check_torch(self) -> None:
        pass

    def _current_index(self) -> int:
        return 0

    def _tensor_device(self) -> torch.device:
        return torch.device("cpu")

    def _enter_torch(self) -> None:
        pass

    def release_unused(self) -> None:
        pass

    def _take_workspaces(self, thread: str) -> None:
        self._workspaces[thread] = 0

    def _drop_workspaces(self) -> None:
        pass

    def wait_for_thread(self) -> None:
        pass

    def generator(self, seed: int) -> torch.Generator | None:
        return None


class Hopping(Policy):
    """Every group of a job runs on another lane than the one before: all that orders a job's own
    work are the waits between the streams."""

    name: ClassVar[str] = "hopping"

    def schedule(self, jobs: Sequence[PlanJob], budget: int, lanes: int = 2) -> Schedule:
        """Places for up to as many jobs as there are lanes."""
        groups = tuple(
            cut_at(job.profile, range(0, job.profile.num_nodes, 1 + job.profile.num_nodes // 8))
            for job in jobs
        )
        pairs = []
        for place in range(max(map(len, groups))):
            pair: list[GroupRef | None] = [None] * lanes
            for job, own in enumerate(groups):
                if place < len(own):
                    pair[(place + job) % lanes] = GroupRef(job, place)
            pairs.append(tuple(pair))
        peak = planned_peak(groups, pairs, [job.profile.persistent_bytes for job in jobs])
        return Schedule(self.name, lanes, groups, tuple(pairs), peak)


def train_hopping(names: Sequence[str]) -> dict[str, list[float]]:
    """The losses of these jobs of the table, trained while they hop between the lanes."""
    jobs = [JOBS[name]() for name in names]
    device = FakeCudaDevice()
    report = wf.run(jobs, memory="256MiB", device=device, policy=Hopping(), threads=1)
    return {job.name: job.losses for job in report if job.ok}
