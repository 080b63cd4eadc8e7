"""Work of the tests that others can wait for: compilers and long programs run beside other tests.

One pytest process runs one test at a time, on one core. A test that needs a compiled program
therefore takes a `Task` as a parameter, conftest.py starts the tasks of all tests that are selected
when the session begins, and puts these tests last. The test asks for the result, which is there by
then or is waited for, and fails with what the compiler or the program said. Where several processes
share the tests (pytest-xdist), no task is started before it is asked for.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Seconds for one command; the tests' own limit in pyproject.toml is a little higher.
LIMIT = 280


class Task(Generic[T]):
    """Work that is done once a session, with the results of the tasks that it `needs`."""

    def __init__(self, name: str, work: Callable[..., T], needs: Sequence[Task[Any]] = ()) -> None:
        self.name = name
        self._work = work
        self._needs = needs
        self._future: Future[T] | None = None

    def __repr__(self) -> str:
        return self.name

    def start(self) -> Future[T]:
        """Puts the work in the queue, behind what it needs, unless it has been put there before."""
        if self._future is None:
            # Ahead in the queue, so the one thread that there may be never waits for them in vain.
            needs = [need.start() for need in self._needs]
            self._future = _workers().submit(
                lambda: self._work(*(future.result() for future in needs))
            )
        return self._future

    def result(self) -> T:
        """Waits for the work. Raises what it raised: a failed assertion, or pytest's skip.

        For tests, that is, for one thread. A task's own work gets what it needs.
        """
        _commands.waiting = True
        try:
            return self.start().result()
        finally:
            _commands.waiting = False


class _Commands:
    """The commands that run now, and whether somebody waits for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()
        self.waiting = False
        self.stopped = False


_commands = _Commands()


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """On half of the cores, so that the tests themselves have the others."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "tasks")


@functools.cache
def folder() -> Path:
    """Where tasks put their files; it goes when the session ends."""
    return Path(tempfile.mkdtemp(prefix="waterflow-tests-"))


def call(*command: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, or kills it after `LIMIT` seconds; looks at no exit status.

    It yields to the tests that run meanwhile, unless a test waits.
    """
    words = [str(word) for word in command]
    polite = [] if _commands.waiting else ["nice", "-n", "10"]
    pipe = subprocess.PIPE
    with _commands.lock:
        if _commands.stopped:
            raise RuntimeError("the session has ended")
        process = subprocess.Popen(
            polite + words, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        _commands.running.add(process)
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
        errors += f"\n{words[0]}: killed after {LIMIT} s"
    finally:
        with _commands.lock:
            _commands.running.discard(process)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def stop() -> None:
    """Ends all that runs, with its children, and drops what was made; no task starts again."""
    with _commands.lock:
        _commands.stopped = True
        for process in _commands.running:
            _kill(process)
    if _workers.cache_info().currsize:
        _workers().shutdown(cancel_futures=True)
    if folder.cache_info().currsize:
        shutil.rmtree(folder(), ignore_errors=True)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:  # else its number may be another's by now
        os.killpg(process.pid, signal.SIGKILL)
