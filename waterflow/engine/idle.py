"""Why lanes have had nothing to run while jobs flowed."""

from __future__ import annotations

import time
from collections.abc import Iterable

from waterflow.engine.job_run import JobRun
from waterflow.engine.states import JobState
from waterflow.report.idle import IdleReason


def why_idle(lack: Iterable[JobRun]) -> IdleReason:
    """What a lane waits for that can run no job; `lack`: those that have no batch."""
    return "data" if any(job.state is JobState.RUNNING for job in lack) else "jobs"


class IdleTimes:
    """Seconds of lanes, by reason. Not thread-safe: `RunContext.state` guards it."""

    def __init__(self) -> None:
        self._seconds: dict[IdleReason, float] = {}

    def note(self, reason: IdleReason, since: float) -> None:
        """Counts the time from a moment of `time.perf_counter` until now."""
        self.add(reason, time.perf_counter() - since)

    def add(self, reason: IdleReason, seconds: float) -> None:
        """Counts some time."""
        self._seconds[reason] = self._seconds.get(reason, 0.0) + max(0.0, seconds)

    def seconds(self, waited_for_memory: float) -> dict[IdleReason, float]:
        """All of it.

        Args:
            waited_for_memory: seconds that lanes have waited at gates, which count as between steps
                as far as has been noted.
        """
        python = max(0.0, self._seconds.get("python", 0.0) - waited_for_memory)
        found = {**self._seconds, "python": python, "memory": waited_for_memory}
        return {reason: seconds for reason, seconds in found.items() if seconds > 0}
