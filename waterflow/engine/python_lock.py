"""The lock for what is done for jobs between their steps, of which is known who is behind it."""

from __future__ import annotations

import threading
from collections.abc import Collection


class PythonLock:
    """A lock that its owner may take again."""

    def __init__(self, asked: threading.Condition | None = None) -> None:
        """Args beyond the obvious.

        asked: notified when somebody begins to wait for the lock; None where nobody wants to know.
        """
        self._lock = threading.RLock()
        self._asked = asked
        self._owner: int | None = None
        self._depth = 0
        self._waiting: set[int] = set()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            self._wait(thread)
        self._owner = thread
        self._depth += 1

    @property
    def is_here(self) -> bool:
        """Whether the calling thread has it."""
        return self._owner == threading.get_ident()

    def leave(self) -> int:
        """The calling thread, which has it, gives it up until it comes back; returns how often it
        had it."""
        depth = self._depth
        for _ in range(depth):
            self.__exit__()
        return depth

    def come_back(self, depth: int) -> None:
        """Takes it as often as before."""
        for _ in range(depth):
            self.__enter__()

    def _wait(self, thread: int) -> None:
        self._waiting.add(thread)
        if self._asked is not None:
            with self._asked:
                self._asked.notify_all()
        self._lock.acquire()
        self._waiting.discard(thread)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()

    def is_kept_from(self, threads: Collection[int | None], owners: Collection[int]) -> bool:
        """Whether one of these threads waits for it while one of the owners has it.

        Args:
            threads: their identifiers.
            owners: threads that give nothing up before this is over.
        """
        return self._owner in owners and not self._waiting.isdisjoint(threads)
