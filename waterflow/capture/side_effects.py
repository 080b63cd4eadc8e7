"""Runs the user's code for a trace as if it had not run: watched, with random streams to throw
away, and with all that it has changed put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from waterflow.account.purity import undisturbed
from waterflow.capture.assumptions import Assumptions, Seen
from waterflow.capture.caller import CallerContext
from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.executor.run import rng as streams
from waterflow.executor.run.rng import JobRng
from waterflow.job.job import Job
from waterflow.job.optimizer_state import moved_numbers

Result = TypeVar("Result")


class TraceWatch:
    """Around traces of one job's step.

    Attributes:
        assumptions: what the traces take for granted: the state before them.
        left: what of that they have changed and could not be put back.
    """

    left: Sequence[str] = ()

    def __init__(
        self,
        job: Job,
        rng: JobRng | None = None,
        caller: CallerContext | None = None,
        seen: Seen | None = None,
        patience: float | None = None,
    ) -> None:
        """Args beyond the obvious.

        rng: the job's random streams; copies are drawn from.
        caller: the context of the job's Python; the calling thread's if None.
        seen: what eager steps of the job have executed, if any were observed.
        patience: see `Assumptions`.
        """
        self._seen = seen
        self._patience = patience
        self._job = job
        self._rng = rng
        self._caller = caller or CallerContext()

    def __enter__(self) -> TraceWatch:
        with contextlib.ExitStack() as stack:
            # A trace makes so many objects that collections would look through all there are, time
            # and again. It leaves next to none that only a collection frees.
            stack.enter_context(undisturbed())
            stack.enter_context(TRACE_LOCK)
            stack.enter_context(PYTHON_TURNS.alone())
            streams.install()
            stack.callback(streams.uninstall)
            self._streams = JobRng(0) if self._rng is None else self._rng.copy()
            self._before = self._streams.state()
            self.assumptions = Assumptions(
                self._job, self._caller, seen=self._seen, patience=self._patience
            )
            self._groups = [dict(group) for group in self._job.optimizer.param_groups]
            stack.callback(self._put_back)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(self, function: Callable[[], Result]) -> Result:
        """Calls what runs the user's code, in its context."""
        return self._caller.run_for_nothing(self._streams, function)

    @property
    def touched_streams(self) -> bool:
        """Whether the traced code has looked at torch's random state, or set it."""
        return self._streams.touched

    def problem(self) -> str | None:
        """What the traced code did that a captured step would not do; it is put back."""
        problem = self._drawn() or self._tuned() or self._changed()
        self._put_back()
        return problem

    def _put_back(self) -> None:
        self.left = self.assumptions.restore()
        self._streams.restore(self._before)
        for group, before in zip(self._job.optimizer.param_groups, self._groups, strict=False):
            if moved_numbers(before, group):
                group.clear()
                group.update(before)

    def _tuned(self) -> str | None:
        for group, before in zip(self._job.optimizer.param_groups, self._groups, strict=False):
            moved = moved_numbers(before, group)
            if moved:
                return f"the step changes the optimizer's hyperparameter {moved[0]!r}"
        return None

    def _changed(self) -> str | None:
        if self.assumptions.hold():
            return None
        return (
            f"the step changes {self.assumptions.difference()}, and a captured step would not (a "
            "tensor that must persist belongs in a buffer of the model)"
        )

    def _drawn(self) -> str | None:
        now, before = self._streams.state(), self._before
        if not torch.equal(now.host, before.host):
            return "the step sets torch's random state, which a captured step cannot replay"
        source = None
        if now.python != before.python:
            source = "Python's random module"
        elif not _same_numpy(now.numpy, before.numpy):
            source = "numpy.random"
        return source and f"the step draws from {source}, a captured step would repeat the number"


def _same_numpy(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_numpy(one[k], other[k]) for k in one)
    return bool(np.array_equal(one, other))
