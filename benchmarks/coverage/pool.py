"""Worker processes: a case that dies or hangs is counted, and the rest goes on.

A worker tries one case after another and is replaced where it dies or takes too long. What a dying
process has written to stderr (Python's traceback of the signal) becomes the reason.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.coverage.trial import Kind, Outcome

_STARTING = 180.0  # seconds that a worker has to import what a suite needs
_TAIL = 6  # lines of stderr that are kept


@dataclass(frozen=True, slots=True)
class Task:
    """A case of a suite."""

    suite: str
    name: str


Done = Callable[[Task, Outcome], None]


def run_all(tasks: Iterable[Task], workers: int, seconds: float, audit: str, done: Done) -> None:
    """Tries all tasks in worker processes; calls `done` for each, from several threads in turn."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker(audit)
        try:
            while True:
                task = waiting.get_nowait()
                outcome = worker.outcome(task, seconds)
                with lock:
                    done(task, outcome)
        except queue.Empty:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Worker:
    """One process at a time, and what it has written."""

    def __init__(self, audit: str) -> None:
        self._audit = audit
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._log = Path(tempfile.mkstemp(prefix="coverage-", suffix=".log")[1])

    def outcome(self, task: Task, seconds: float) -> Outcome:
        """What became of the task; starts a process where there is none."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        self._pipe.send(task)
        reason = ""
        try:
            for limit in (_STARTING, seconds):  # the suite is loaded; the case has been tried
                if not self._pipe.poll(limit):
                    reason = f"no answer in {limit:.0f} s"
                    break
                found: Outcome | None = self._pipe.recv()
                if found is not None:
                    return found
        except (EOFError, ConnectionError):  # it has died
            pass
        self._kill()
        return Outcome(Kind.CRASHED, reason or self._last_words())

    def end(self) -> None:
        """Lets the process go."""
        self._kill()
        self._log.unlink(missing_ok=True)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._log.write_text("")
        self._process = spawn.Process(target=_work, args=(other, str(self._log), self._audit))
        self._process.start()
        other.close()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        fatal = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
        kept = lines[fatal[-1] :][:_TAIL] if fatal else lines[-_TAIL:]
        return " | ".join(kept) or "the process ended without a word"


def _work(pipe: Connection, log: str, audit: str) -> None:
    """The worker's own loop."""
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    faulthandler.enable()
    # Not before the output is redirected: imports may write, and die.
    import torch

    from benchmarks.coverage.suites import Suite, load
    from benchmarks.coverage.trial import outcome_of

    torch.set_num_threads(1)
    loaded: dict[str, Suite] = {}
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        if task.suite not in loaded:
            loaded[task.suite] = load(task.suite)
        pipe.send(None)
        try:
            outcome = outcome_of(loaded[task.suite].trials(task.name), audit)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            text = f"{type(error).__name__}: {error} ({place})"
            outcome = Outcome(Kind.SKIPPED, f"the case cannot be made: {text}")
        pipe.send(outcome)
