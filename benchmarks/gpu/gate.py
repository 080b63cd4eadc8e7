"""Holds the jobs of a running engine between two measurements.

Capturing and planning take seconds, and a run of `wf.run` does them anew. Here the jobs of *one*
run stop at a gate for want of data, other contenders have their turn, and the jobs go on where they
were: runs can be interleaved, and only steps are timed. A job's scheduler counts the steps that the
engine is done with; unlike `on_step`, it asks for no loss, so nothing waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

Batch = TypeVar("Batch")


class StepCounter:
    """A job's `scheduler`: changes no rate, tells the gate of each step."""

    def __init__(self, gate: Gate, index: int) -> None:
        self._gate = gate
        self._index = index

    def step(self) -> None:
        self._gate.note_step(self._index)


class Gate:
    """Lets each of `jobs` jobs make a number of steps at a time."""

    def __init__(self, jobs: int) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._done = [0] * jobs
        self._closed = False
        self._error: BaseException | None = None

    def batches(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """A job's data: its batches in turn, as many as the gate lets through."""
        taken = 0
        while self._wait_for_permission(taken):
            yield batches[taken % len(batches)]
            taken += 1

    def counter(self, index: int) -> StepCounter:
        """The scheduler of one of the jobs."""
        return StepCounter(self, index)

    def run(self, steps: int, timeout: float) -> None:
        """Lets every job make so many steps and waits until the engine is done with them.

        Raises:
            TimeoutError: they did not end in time.
            Whatever `fail` was given.
        """
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()
            ended = self._changed.wait_for(self._is_over, timeout)
            if self._error is not None:
                raise self._error
            if not ended:
                raise TimeoutError(f"steps done: {self._done}, wanted: {self._allowed} of each job")

    def note_step(self, index: int) -> None:
        """One of the jobs has made a step."""
        with self._changed:
            self._done[index] += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The run has broken: whoever waits for steps gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the jobs' data."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._error is not None or min(self._done) >= self._allowed

    def _wait_for_permission(self, taken: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or taken < self._allowed)
            return not self._closed
