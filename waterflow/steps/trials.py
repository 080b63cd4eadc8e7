"""Eager steps that show, under observation, whether a job's steps may be traced."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from waterflow.capture.assumptions import Assumptions, Seen
from waterflow.capture.caller import CallerContext
from waterflow.capture.tracing import users_line
from waterflow.job.job import Job
from waterflow.steps.opacity import Opacity
from waterflow.steps.prepared import PreparedBatch

#: So many observed steps may change what later steps read, as caches do that settle.
_MOST_MOVES = 1


class TrialNeeded(Exception):
    """No error: before a trace, eager steps have to show that they move nothing for good."""


class Trials:
    """What observed steps of a job have shown.

    Attributes:
        seen: what steps have executed that had to be tried before a trace; None before any was.
    """

    def __init__(
        self, job: Job, caller: CallerContext, opacity: Opacity, *, may_try: bool = True
    ) -> None:
        """Args beyond the obvious.

        caller: the context of the thread that submitted the job.
        opacity: where steps are given up that move what they read.
        may_try: whether eager steps may come before a trace, to be observed. Where nothing is
            trained, as for a study, none can, and none is waited for.
        """
        self._job = job
        self._caller = caller
        self._opacity = opacity
        self._may_try = may_try
        self.seen: Seen | None = None
        self._passed: set[Hashable] = set()  # signatures of batches that were tried
        self._moves = 0

    def has_passed(self, signature: Hashable) -> bool:
        """Whether a step on such a batch has moved nothing."""
        return signature in self._passed

    def may_precede(self, signature: Hashable) -> bool:
        """Whether a step on such a batch may be tried before it is traced."""
        return self._may_try and not self.has_passed(signature)

    def demand(self, signature: Hashable) -> None:
        """Before a trace for such batches.

        Raises:
            TrialNeeded: steps of the job are tried first, and none on such a batch was.
        """
        if self.seen is not None and not self.has_passed(signature):
            raise TrialNeeded

    def demand_for(self, signature: Hashable, assumptions: Assumptions) -> None:
        """Before a trace for such batches that takes this for granted.

        Raises:
            TrialNeeded: it may move something for good, and no step on such a batch was tried.
        """
        if self.may_precede(signature) and assumptions.risk() is not None:
            raise TrialNeeded

    def begin(self) -> Assumptions | None:
        """Before an eager step that is a trial: what there is now; None before the first one, which
        shows what to look at."""
        if self.seen is None:
            return None
        return Assumptions(self._job, self._caller, seen=self.seen)

    def end(self, prepared: PreparedBatch, before: Assumptions | None, observer: Any) -> None:
        """After it: whether steps on such batches may be traced.

        Raises:
            CaptureError: they may not, and the job insists on capture.
        """
        moved = None if before is None else before.difference()
        now = before or Assumptions(self._job, self._caller, seen=Seen.by(observer))
        problem = now.narrow(observer)
        self.seen = now.seen
        if moved is not None:
            problem = self.count_move(moved) or problem
        if problem is not None:
            self._opacity.give_up_step(problem)
        elif before is not None and moved is None:
            assert prepared.flat is not None
            self._passed.add(prepared.flat.signature)

    def count_move(self, what: str) -> str | None:
        """An observed step has changed what steps read: some settle with the first, as caches do.

        Returns:
            Why steps cannot be captured, where that was once too often.
        """
        self._moves += 1
        if self._moves <= _MOST_MOVES:
            return None
        where = "" if ".py:" in what else f" ({users_line(None, self._job.function)})"
        return f"the step changes {what}{where}"

    def note_seen(self, assumptions: Assumptions) -> None:
        """A check has seen more of what a step executes: later trials look at that, too."""
        if self.seen is not None:
            self.seen = assumptions.seen
