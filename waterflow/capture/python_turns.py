"""Whose Python runs now: steps and callbacks of all jobs beside each other, or one trace alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

#: Nobody waits longer than this for the others: a callback may itself wait for another run.
_PATIENCE_SECONDS = 5.0


class PythonTurns:
    """Steps and callbacks of jobs run beside each other, a trace beside neither.

    What a trace has changed is put back, and must not be what somebody else changed meanwhile.
    """

    def __init__(self) -> None:
        self._turn = _Turn(self)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running = 0
        self._traces = 0  # that wait or run

    def shared(self) -> AbstractContextManager[None]:
        """Around a step or a callback."""
        return self._turn

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Where a step waits for other steps: a trace may run meanwhile."""
        self._turn.__exit__()
        try:
            yield
        finally:
            self._turn.__enter__()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Around a trace."""
        with self._changed:
            self._traces += 1
            self._changed.wait_for(lambda: self._running == 0, _PATIENCE_SECONDS)
        try:
            yield
        finally:
            with self._changed:
                self._traces -= 1
                self._changed.notify_all()


class _Turn(AbstractContextManager[None]):
    """Somebody's turn; around every callback, so it is no generator."""

    __slots__ = ("_turns",)

    def __init__(self, turns: PythonTurns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        turns = self._turns
        with turns._lock:
            if turns._traces:
                turns._changed.wait_for(lambda: turns._traces == 0, _PATIENCE_SECONDS)
            turns._running += 1

    def __exit__(self, *error: object) -> None:
        turns = self._turns
        with turns._lock:
            turns._running -= 1
            if turns._traces:
                turns._changed.notify_all()


#: Whose Python runs now, of all engines of the process.
PYTHON_TURNS = PythonTurns()
