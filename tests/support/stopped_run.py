"""A process that trains jobs until each has its checkpoints, and then kills itself.

    python -m tests.support.stopped_run FOLDER STEPS CAPTURE NAME...

STEPS are numbers with commas: the checkpoints after so many go to FOLDER/STEPS, each. CAPTURE is
"auto" or "True".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Any

import numpy as np

import waterflow as wf
from tests.support.jobs import MODELS, OPTIMIZERS, SCHEDULERS, TRAINING
from tests.support.resumable import RESUMABLE
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.checkpoint.writer import SnapshotWriter

JOBS = {**MODELS, **TRAINING, **SCHEDULERS, **OPTIMIZERS, **RESUMABLE}
EPOCHS = 4


def make(name: str, capture: str) -> wf.Job:
    """The job, for more epochs than it has in the table; the process's streams begin anew."""
    random.seed(1)
    np.random.seed(2)
    job: Any = JOBS[name]
    made = job(epochs=EPOCHS, steps=None)
    if made.capture == "auto" and capture == "True":
        made.capture = True
    return made


def main() -> None:
    folder, steps, capture, *names = sys.argv[1:]
    left = {(name, int(step)) for name in names for step in steps.split(",")}
    lock = threading.Lock()

    def keep(_: SnapshotWriter, snapshot: JobSnapshot) -> None:
        """Each in the folder of its step, at once; with the last one all is over."""
        with lock:
            if (snapshot.job, snapshot.steps) in left:
                kept = CheckpointFolder(f"{folder}/{snapshot.steps}")
                with kept.opened(names):
                    kept.write(snapshot)
                left.remove((snapshot.job, snapshot.steps))
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    SnapshotWriter.put = keep  # type: ignore[method-assign]
    jobs = [make(name, capture) for name in names]
    report = wf.run(
        jobs, memory="1GiB", threads=1, checkpoint=f"{folder}/run", checkpoint_every="1 step"
    )
    sys.exit(f"not killed: {left}, {[job.error for job in report]}")


if __name__ == "__main__":
    main()
