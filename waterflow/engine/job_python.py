"""A job's Python: in which context it runs, in whose turn, and on which thread callbacks do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from waterflow.capture.caller import CallerContext
from waterflow.capture.own_business import OwnBusiness
from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.engine.callbacks import Callbacks
from waterflow.executor.run.rng import JobRng

Result = TypeVar("Result")


class JobPython:
    """Runs Python of one job's.

    Attributes:
        callbacks: where its callbacks run.
    """

    def __init__(self, name: str, caller: CallerContext, rng: JobRng, callbacks: Callbacks) -> None:
        """Args:

        name: the job's.
        caller: the context in which it was submitted.
        rng: its random streams.
        callbacks: where its callbacks run.
        """
        self._name = name
        self._caller = caller
        self._rng = rng
        self.callbacks = callbacks

    @property
    def calls_back_elsewhere(self) -> bool:
        """Whether its callback is made on another thread than the one that has its step told of."""
        return self.callbacks.in_caller

    def run(self, function: Callable[[], Result]) -> Result:
        """Runs what is to be in the job's caller's context, with its random streams."""
        return self._caller.run(self._rng, function)

    def in_turn(self, function: Callable[[], Result]) -> Result:
        """The same in turn with traces."""
        if self._caller.is_inside:  # in a train of steps, which sees to that
            return function()
        with PYTHON_TURNS.shared():
            return self.run(function)

    def look(self, function: Callable[[], Result]) -> Result:
        """Runs what only looks, on any thread."""
        with PYTHON_TURNS.shared():
            return self._caller.run_apart(self._rng, function)

    def fetch(self, function: Callable[[], Result], is_ahead: Callable[[], bool]) -> Result:
        """Runs what fetches its data, which may take its time; `is_ahead` tells whether that may be
        beside a step."""
        if self._caller.is_inside:  # in a train, between two steps
            return function()
        run = self._caller.run_apart if is_ahead() else self._caller.run
        return run(self._rng, function)

    def call_back(self, function: Callable[[], Result], own: OwnBusiness | None = None) -> Result:
        """Runs a callback of the job's, on the thread on which callbacks run; `own`: see
        `Callbacks.run`."""
        callbacks, name = self.callbacks, self._name
        if not callbacks.in_caller:
            return self.in_turn(functools.partial(callbacks.run, name, function, own))
        # A trace may run while somebody waits for the callback, but not beside it.
        if self._caller.is_inside:  # this thread, which waits, and nobody else may be
            self._caller.hand_over()
            with PYTHON_TURNS.paused():
                return callbacks.run(name, functools.partial(self._beside, function))
        return callbacks.run(name, functools.partial(self.in_turn, function))

    def _beside(self, function: Callable[[], Result]) -> Result:
        """For a callback for which a thread waits that is in the job's context."""
        with PYTHON_TURNS.shared():
            return self._caller.run_beside(self._rng, function)
