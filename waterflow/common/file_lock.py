"""A lock on a file for one process at a time: those that it forks have none, and keep none.

The system ties `flock` to the open file, which a forked process shares: a worker of a data loader
would hold the lock for as long as it lives, also when the process that took it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_held: set[int] = set()  # descriptors


def _leave_behind() -> None:
    """In a process that was just forked. To close is not to unlock, as long as others have it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_behind)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process, nor anybody else in this one, is inside with this file.

    Raises:
        BlockingIOError: somebody is.
        OSError: the file cannot be opened.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(lock)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        if lock in _held:  # else this is a forked process
            with contextlib.suppress(OSError):  # a process that is just being forked has it, too
                fcntl.flock(lock, fcntl.LOCK_UN)
            _held.discard(lock)
            os.close(lock)
