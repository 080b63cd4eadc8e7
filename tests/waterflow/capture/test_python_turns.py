"""Traces and steps take turns."""

import threading
import time

import pytest

from waterflow.capture import python_turns
from waterflow.capture.python_turns import PYTHON_TURNS, PythonTurns

pytestmark = pytest.mark.cpu


def test_a_trace_runs_beside_no_step():
    inside, overlaps, done = [], [], threading.Event()

    def steps():
        while not done.is_set():
            with PYTHON_TURNS.shared():
                inside.append(1)
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with PYTHON_TURNS.alone():
            overlaps.append(len(inside))
            time.sleep(0.001)
            overlaps.append(len(inside))
    done.set()
    for thread in threads:
        thread.join()
    assert set(overlaps) == {0}


def test_a_trace_may_run_where_a_step_waits(monkeypatch):
    monkeypatch.setattr(python_turns, "_PATIENCE_SECONDS", 100)
    with PYTHON_TURNS.shared():
        started = time.monotonic()
        with PYTHON_TURNS.paused(), PYTHON_TURNS.alone():
            pass
        assert time.monotonic() - started < 50


def test_nobody_waits_for_ever(monkeypatch):
    """A callback may itself wait for what a trace of another run waits for."""
    monkeypatch.setattr(python_turns, "_PATIENCE_SECONDS", 0.01)
    turns = PythonTurns()
    with turns.shared(), turns.alone(), turns.shared():
        pass
