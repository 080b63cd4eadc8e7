"""An MPS daemon of our own, in a folder of its own, for as long as a benchmark needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.worker import Worker, WorkerError

NO_CUDA = "needs CUDA"

_CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps(device: str) -> Iterator[tuple[dict[str, str], str | None]]:
    """The environment of the daemon's clients, and why it cannot be had, if it cannot."""
    if device == "cpu" or shutil.which(_CONTROL) is None:
        yield {}, NO_CUDA if device == "cpu" else f"{_CONTROL} is not installed"
        return
    with tempfile.TemporaryDirectory(prefix="waterflow-mps-") as folder:
        clients = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in clients.values():
            Path(path).mkdir()
        try:
            yield clients, _start(clients)
        finally:
            _control(clients, [], "quit\n")


def _control(clients: Mapping[str, str], arguments: list[str], text: str = "") -> str | None:
    """Runs the control program; returns what it complained about."""
    try:
        ended = subprocess.run(
            [_CONTROL, *arguments],
            env={**os.environ, **clients},
            input=text,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it does not answer"
    return (ended.stdout + ended.stderr).strip()[:200] if ended.returncode else None


def _start(clients: Mapping[str, str]) -> str | None:
    complaint = _control(clients, ["-d"])
    if complaint is not None:
        return f"the MPS daemon does not start: {complaint}"
    client = Worker(clients)
    try:
        client.call("benchmarks.gpu.contenders:warm_up", 60, device="cuda", seconds=0.01)
    except WorkerError as error:
        return f"a client of the MPS daemon does not work: {str(error)[:200]}"
    finally:
        client.close()
    return None
