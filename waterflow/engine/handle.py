"""A submitted job, seen from outside."""

from __future__ import annotations

from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.report.job_report import JobReport, State


class JobHandle:
    """A submitted job, seen from outside."""

    def __init__(self, queue: JobQueue, job: JobRun) -> None:
        self._queue = queue
        self._job = job

    @property
    def name(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def status(self) -> State:
        """ "queued", "running", "finished", "stopped", "failed" or "out_of_memory"."""
        return self._job.state.status

    @property
    def losses(self) -> list[float]:
        """The losses so far, one per step."""
        return list(self._job.report.losses)

    def stop(self) -> None:
        """Ends the job after its present step."""
        self._queue.request_stop(self._job)

    def result(self, timeout: float | None = None) -> JobReport:
        """Waits for the job's end and returns its report.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
        """
        if not self._queue.wait_for_end(self._job, timeout):
            raise TimeoutError(f"job {self.name!r} has not ended within {timeout} seconds")
        return self._job.report
