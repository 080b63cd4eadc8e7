"""Processes that several threads start by fork: one after another.

`multiprocessing` tells the end of a process by a pipe whose other end the process alone has. One
that another thread forks before the parent has closed that end has it, too, and keeps it open for
as long as it lives. Whoever waits for the first one to end then waits for the second: each of
torch's data loaders five seconds at the end of each epoch (eight jobs of two epochs with a worker
each took 6 to 21 s, and take 1.4).
"""

from __future__ import annotations

import os
import threading
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any

_launch: Any = Popen._launch  # type: ignore[attr-defined]
_lock = threading.RLock()
_count_lock = threading.Lock()
_installed = 0


def install() -> None:
    """From now on processes are forked in turn, until as many `uninstall`s."""
    global _installed
    with _count_lock:
        _installed += 1
        if Popen._launch is _launch:  # type: ignore[attr-defined]
            Popen._launch = _launch_in_turn  # type: ignore[attr-defined]


def uninstall() -> None:
    """Takes back one `install`; with the last, `multiprocessing` is what it was."""
    global _installed
    with _count_lock:
        _installed -= 1
        if not _installed and Popen._launch is _launch_in_turn:  # type: ignore[attr-defined]
            Popen._launch = _launch  # type: ignore[attr-defined]


def _launch_in_turn(self: Popen, process: BaseProcess) -> None:
    with _lock:
        _launch(self, process)


def _renew() -> None:
    """In a process that was just forked: it has one thread, and the lock may be held by others."""
    global _lock, _count_lock
    _lock, _count_lock = threading.RLock(), threading.Lock()


os.register_at_fork(after_in_child=_renew)
