"""A job's `on_step`: beside which others it may run, and what is selected before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from waterflow.allocator_ext import _C
from waterflow.capture.callbacks import may_select_ahead
from waterflow.capture.own_business import OwnBusiness
from waterflow.capture.python_kind import code_of
from waterflow.common.errors import JobError
from waterflow.engine.job_python import JobPython
from waterflow.executor.data.batches import tensors_behind
from waterflow.job.job import Job
from waterflow.steps.step_cache import StepCache

Result = TypeVar("Result")

#: One that takes longer is not to keep others from theirs, where these have nothing to do with each
#: other.
_LONG_SECONDS = 0.001


class OnStep:
    """The callback of one job, which may be another one after each step."""

    def __init__(
        self, job: Job, python: JobPython, cache: StepCache, is_ahead: Callable[[], bool]
    ) -> None:
        """Args:

        job: whose callback it is.
        python: where it runs.
        cache: the job's captures.
        is_ahead: whether there are batches that were fetched before the step that it is asked of.
        """
        self._job = job
        self._name = job.name  # by which it is known, whatever the callback calls it
        self._python = python
        self._cache = cache
        self._is_ahead = is_ahead
        self._takes_long = False  # one of its calls took a while
        self._business: tuple[Any, OwnBusiness | None] = None, None  # of which callback, and what
        # What it was found from: captures, the callback.
        self._selects_ahead: tuple[tuple[int, Any], bool] = (-1, None), False
        self._selected_from: Any = None  # versions of what batches are selected from ahead

    def call(self, function: Callable[[], Result]) -> Result:
        """Asks it about a step, by that function, beside others if it takes its time.

        Raises:
            JobError: it has changed what batches were selected from before it.
        """
        started = time.perf_counter()
        answer = self._python.call_back(function, self._own_business)
        if time.perf_counter() - started > _LONG_SECONDS:
            self._takes_long = True
            if (code := code_of(self._job.on_step)) is not None:
                self._python.callbacks.long.add(code)
        selected = self._selected_from
        if selected is not None and self._is_ahead() and selected.changed():
            raise JobError(
                f"job {self._name!r}: its callback has changed the tensors of its dataset in "
                "place, after batches had been selected from them, as nothing in its code says "
                "that it does: say so (relu_, inplace=True), or give the job capture=False"
            )
        return answer

    @property
    def _own_business(self) -> OwnBusiness | None:
        """What it has to do with, if it takes a while and is nobody else's affair."""
        on_step = self._job.on_step
        if on_step is None or self._python.calls_back_elsewhere:
            return None
        long = self._python.callbacks.long
        if not (self._takes_long or (long and code_of(on_step) in long)):
            return None
        known, own = self._business
        if known is not on_step:
            own = OwnBusiness.of(on_step, self._job.root)
            self._business = on_step, own
        return own

    def may_select_ahead(self) -> bool:
        """Whether batches may be selected before it is called; whoever asks does so."""
        on_step = self._job.on_step
        (captures, known), selects = self._selects_ahead
        if captures != self._cache.captures or known is not on_step:
            selects = may_select_ahead(self._job, self._cache.written())
            self._selects_ahead = (self._cache.captures, on_step), selects
        self._selected_from = _C.Versions(tensors_behind(self._job.data)) if selects else None
        return selects
