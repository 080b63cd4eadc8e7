"""Ctrl-C ends a run and what it was part of; a second one waits for nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

JOBS = """
import time, torch, torch.nn.functional as F, waterflow as wf

def job(name, on_step=None, steps=10**9):
    model = torch.nn.Linear(8, 2)
    data = [(torch.randn(16, 8), torch.randint(2, (16,)))] * 10
    return wf.Job(name, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
                  loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), data=data, steps=steps,
                  on_step=on_step)
"""
LOOP = """
def started(result):
    if result.step == 3:
        print("started", flush=True)

runs = 0
try:
    for _ in range(3):
        runs += 1
        wf.run([job("a", started), job("b")], "8MiB")
except KeyboardInterrupt as stopped:
    states = [one.state for one in stopped.report]
    print(runs, type(stopped).__name__, stopped.report.interrupted, states)
"""
SLEEPER = """
def sleeping(result):
    print("started", flush=True)
    time.sleep(600)

try:
    wf.run([job("a", sleeping), job("b")], "8MiB")
except KeyboardInterrupt as stopped:
    print("left", stopped.report["a"].steps)
print(wf.run([job("c", steps=5)], "8MiB")["c"].state)
"""


def pressed(program: str, tmp_path: Path, presses: int) -> tuple[str, str, int]:
    """What the program prints when Ctrl-C is pressed once it has started, and again later."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(JOBS + program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        env={**os.environ, "WATERFLOW_CACHE": str(tmp_path), "WATERFLOW_TIERS": "on"},
        # A shell that runs the tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline().strip() == "started"
        for press in range(presses):
            process.send_signal(signal.SIGINT)
            if press == 0 and presses > 1:  # until it says that it waits
                assert "interrupt again" in process.stderr.readline()
                time.sleep(0.1)
        output, said = process.communicate(timeout=250)
        return output, said, process.returncode
    finally:
        process.kill()


def test_a_loop_of_runs_ends_with_the_first(tmp_path: Path) -> None:
    output, said, code = pressed(LOOP, tmp_path, presses=1)
    assert output.strip() == "1 RunInterrupted True ['stopped', 'stopped']", said
    assert code == 0


def test_the_second_leaves_a_callback_that_sleeps(tmp_path: Path) -> None:
    output, said, code = pressed(SLEEPER, tmp_path, presses=2)
    assert output.split("\n")[:2] == ["left 1", "finished"], said
    assert code == 0, said
