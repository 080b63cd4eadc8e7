"""The promise of checkpoints: a job that goes on in another process is one that never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import waterflow as wf
from tests.support.differences import differences
from tests.support.stopped_run import JOBS, make

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[2]
#: In the second or third epoch of all of them, and in its middle.
STEPS = 5
FORMS = ("_foreach", "_fused", "_left", "_ones")
NAMES = [name for name in JOBS if not name.endswith(FORMS)]


def stopped(folder, names, capture, tiers, steps=(STEPS,)):
    """Trains these jobs in another process, which is killed once each has its checkpoints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.stopped_run"]
    done = subprocess.run(
        [*command, str(folder), ",".join(map(str, steps)), capture, *names],
        cwd=ROOT,
        env={**os.environ, "WATERFLOW_TIERS": tiers},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def assert_goes_on(folder, names, capture, steps=STEPS):
    jobs = {name: make(name, capture) for name in names}
    report = wf.run(list(jobs.values()), memory="1GiB", threads=1, resume=folder / str(steps))
    found = {name: what_differs(name, capture, jobs[name], report[name]) for name in names}
    assert {name: what for name, what in found.items() if what} == {}
    assert {report[name].resumed_steps for name in names} == {steps}


def what_differs(name, capture, job, report):
    """In what a job that went on is another one than the plain loop's."""
    expected = make(name, capture)
    eager = wf.run_eager(expected, threads=1)
    found = differences(expected, job)
    found += [] if report.losses == eager.losses else ["losses"]
    return found + ([] if report.state == eager.state else [report.state, report.error])


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_every_job_goes_on_as_if_it_had_never_stopped(tmp_path, monkeypatch, part, tiers):
    names = NAMES[part::4]
    stopped(tmp_path, names, "auto", tiers)
    monkeypatch.setenv("WATERFLOW_TIERS", tiers)
    assert_goes_on(tmp_path, names, "auto")


def test_jobs_go_on_from_any_place_in_an_epoch(tmp_path, monkeypatch):
    """Three batches an epoch: after the first, in the middle, and after the last one of an epoch.
    Their steps are eager first."""
    names = ["cnn_shuffled", "augmented", "generator_of_two"]
    stopped(tmp_path, names, "auto", "on", steps=(1, 5, 6))
    monkeypatch.setenv("WATERFLOW_TIERS", "on")
    for steps in (1, 5, 6):
        assert_goes_on(tmp_path, names, "auto", steps)


@pytest.mark.slow
def test_jobs_that_insist_on_capture_go_on(tmp_path):
    """Their batches are fetched ahead, where their steps draw nothing."""
    names = ["encoder", "noisy_shuffled", "momentum_plain", "amsgrad_plain", "generator"]
    stopped(tmp_path, names, "True", "on", steps=(2, 5))
    for steps in (2, 5):
        assert_goes_on(tmp_path, names, "True", steps)
