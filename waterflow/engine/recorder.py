"""Keeps what a run's report needs: times, spans, the timeline, versions."""

from __future__ import annotations

import collections
import platform
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch

from waterflow.engine.job_run import JobRun
from waterflow.report.report import Spans, Timeline

#: Spans of the first and the last groups are kept, this many of each.
_KEPT_SPANS = 10_000


class Recorder:
    """Records one engine's run in constant memory."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._started: float | None = None
        self._stopped: float | None = None
        self._first: list[tuple[Any, ...]] = []
        self._last: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=_KEPT_SPANS)

    def start(self) -> None:
        """Training begins (the first call counts)."""
        self._started = self._started or time.perf_counter()

    def stop(self) -> None:
        """Training has ended."""
        self._stopped = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time of training so far: captures before it not included."""
        end = self._stopped or time.perf_counter()
        return end - (self._started or end)

    def keep(self, spans: Iterable[tuple[Any, ...]], members: Sequence[JobRun]) -> None:
        """Keeps spans (lane, place in `members`, group, start, stop) of the present steps."""
        for lane, place, group, start, stop in spans:
            member = members[place]
            span = (lane, member.number, member.report.steps + 1, group, start, stop)
            (self._first if len(self._first) < _KEPT_SPANS else self._last).append(span)

    def spans(self, names: list[str]) -> Spans:
        """The spans kept, in seconds since the engine was made."""
        rows = np.array([*self._first, *self._last], dtype=float).reshape(-1, 6)
        lane, job, step, group = (rows[:, column].astype(int) for column in range(4))
        start, stop = rows[:, 4] - self._origin, rows[:, 5] - self._origin
        return Spans(lane, job, step, group, start, stop, names)

    def timeline(self, arena: Any, names: list[str]) -> Timeline:
        """The arena's own record of who held what when."""
        seconds, job, held = arena.timeline()
        return Timeline(seconds, job, held, names)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    try:
        own = metadata.version("waterflow")
    except metadata.PackageNotFoundError:
        own = "source"
    return {"waterflow": own, "torch": str(torch.__version__), "python": platform.python_version()}
