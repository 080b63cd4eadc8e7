"""Checkpoints of a job: what taking and writing one takes, and reading and giving it back.

    python -m benchmarks.suspend --json

ResNet-50 with its optimizer's momentum, against `torch.save` and `torch.load` of the same state.
Medians of interleaved runs, in seconds. All of them end with the bytes on the disk: `torch.save` is
followed by an fsync, a checkpoint fsyncs itself; and a checkpoint's bytes are hashed on both ways.

`checkpoint_s` is a snapshot and its file, of which `snapshot_s` is what the job waits for; the rest
happens beside training. `restore_s` reads, checks and gives the state to the job.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from waterflow.checkpoint.cursor import DataCursor
from waterflow.checkpoint.job_state import Progress, check, put, take
from waterflow.checkpoint.model import attributes_of
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.executor.run.rng import JobRng
from waterflow.job.epochs import begin_epoch
from waterflow.models.zoo import TASKS

BATCH = 2


def trained(name: str) -> wf.Job:
    """A model of the zoo's, after a step, so that its optimizer has state."""
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    job = wf.Job(name, model, optimizer, task.loss, [task.batch(BATCH)], steps=1, seed=0)
    wf.run_eager(job)
    return job


@dataclass
class Case:
    """A job, and a folder for its state."""

    job: wf.Job
    folder: Path

    def snapshot(self) -> JobSnapshot:
        position = DataCursor(self.job, JobRng(0), begin_epoch).position(1, 0, 1, 0.0)
        before = attributes_of(self.job.model)
        return take(self.job, Progress(0, position, [0.0], 0), before)

    def checkpoint(self) -> None:
        CheckpointFolder(self.folder).write(self.snapshot())

    def restore(self) -> None:
        found = CheckpointFolder(self.folder).read(self.job.name)
        assert found is not None
        check(self.job, found)
        put(self.job, found)

    def torch_save(self) -> None:
        state = {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}
        with open(self.folder / "saved.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        state: Any = torch.load(self.folder / "saved.pt", weights_only=True)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])


@contextmanager
def case(name: str) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        yield Case(trained(name), Path(folder))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return measure


def measure(made: Case, repeats: int) -> dict[str, object]:
    found = interleaved(
        {
            "snapshot_s": timed(made.snapshot),
            "checkpoint_s": timed(made.checkpoint),
            "restore_s": timed(made.restore),
            "torch_save_s": timed(made.torch_save),
            "torch_load_s": timed(made.torch_load),
        },
        repeats,
    )
    medians: dict[str, object] = {key: statistics.median(times) for key, times in found.items()}
    return {**medians, "checkpoint_bytes": made.snapshot().nbytes}


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    with case("resnet50") as made:
        show(measure(made, options.repeats), options.json)


if __name__ == "__main__":
    main()
