"""Checkpoints on a device whose work is done late: a snapshot waits for the steps before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import waterflow as wf
from tests.support.differences import differences
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS, OPTIMIZERS
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.checkpoint.writer import SnapshotWriter

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

JOBS = {**MODELS, **OPTIMIZERS}
NAMES = ["cnn_shuffled", "noisy_shuffled", "amsgrad_plain"]


def run(jobs: list[wf.Job], **options: Any) -> wf.Report:
    return wf.run(jobs, "256MiB", device=FakeCudaDevice(), threads=1, **options)


def test_jobs_go_on(driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = set(NAMES)

    def keep(_: SnapshotWriter, snapshot: JobSnapshot) -> None:  # the first of each
        if snapshot.job in left:
            left.remove(snapshot.job)
            CheckpointFolder(tmp_path).write(snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotWriter, "put", keep)
        made = [JOBS[name](epochs=4) for name in NAMES]
        assert run(made, checkpoint=tmp_path, checkpoint_every="5 steps").ok
    jobs = {name: JOBS[name](epochs=4) for name in NAMES}
    report = run(list(jobs.values()), resume=tmp_path)
    for name, job in jobs.items():
        expected = JOBS[name](epochs=4)
        eager = wf.run_eager(expected, threads=1)
        assert report[name].resumed_steps == 5
        assert report[name].losses == eager.losses
        assert differences(expected, job) == []
