"""A submitted job, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.limits import Limits
from waterflow.job.job import check_max_slowdown, check_priority, check_weight
from waterflow.partitioner import Policy
from waterflow.report.job_report import JobReport, State


def check_job_priority(name: str, priority: str, policy: Policy) -> None:
    """Raises JobError where a job cannot have this priority under this policy."""
    check_priority(priority, f"job {name!r}: ")
    if priority != "normal" and not policy.flows:
        raise JobError(
            f"job {name!r}: priority={priority!r} is for policies under which lanes have a pace of "
            f"their own, {policy.name!r} runs rounds: use policy='flow', or priority='normal'"
        )


class JobHandle:
    """A submitted job, seen from outside."""

    def __init__(self, queue: JobQueue, job: JobRun, policy: Policy, limits: Limits) -> None:
        self._queue = queue
        self._job = job
        self._policy = policy
        self._limits = limits

    @property
    def name(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def status(self) -> State:
        """ "queued", "running", "suspended", "finished", "stopped", "failed" or "out_of_memory"."""
        return self._job.state.status

    @property
    def waits_for_room(self) -> bool:
        """Whether it is ready to run, or to go on, and too much memory is others' for now."""
        return self._queue.waits_for_room(self._job)

    @property
    def losses(self) -> list[float]:
        """The losses so far, one per step."""
        return list(self._job.report.losses)

    def stop(self) -> None:
        """Ends the job after its present step."""
        self._queue.request_stop(self._job)

    def set_priority(self, priority: str) -> None:
        """Has the job go before others from its next step on: see `Job.priority`.

        Raises:
            JobError: there is no such priority, or the policy knows none.
        """
        check_job_priority(self.name, priority, self._policy)
        self._queue.set_share(self._job, priority=priority)

    def set_weight(self, weight: float) -> None:
        """Gives the job another share among its equals: see `Job.weight`.

        Raises:
            JobError: it is no positive number.
        """
        check_weight(weight, f"job {self.name!r}: ")
        self._queue.set_share(self._job, weight=weight)

    def set_max_slowdown(self, slowdown: float) -> None:
        """Says how much slower than alone the job may be as a guaranteed one: see
        `Job.max_slowdown`.

        Raises:
            JobError: it is no positive number.
        """
        check_max_slowdown(slowdown, f"job {self.name!r}: ")
        self._queue.set_share(self._job, max_slowdown=slowdown)

    def set_memory_limit(self, memory: int | str | None) -> None:
        """Plans the job's steps into another limit, also under what they need now: by their order
        first, then by spilling (see `Job.memory_limit`). The same numbers, later.

        Returns when it is done, between two steps; in a callback at once. While no step is captured
        yet, nobody knows what will do: a limit that turns out to be too small then ends this job,
        and no other, with a `BudgetError` that names the smallest.

        Args:
            memory: bytes that the job may need, taking its steps alone, or a text such as "1GiB".
                None: no limit of its own.

        Raises:
            BudgetError: what one operator works on is more; says how much. Nothing has changed.
            JobError: it has ended, or its steps run as eager Python. Nothing has changed.
        """
        limit = None if memory is None else parse_bytes(memory)
        self._queue.ask(lambda: self._limits.limit_job(self._job, limit))

    def suspend(self, timeout: float | None = 0.0) -> bool:
        """Has the job rest after its present step, and give its memory to the others.

        That is when a job holds least; its model, optimizer, random streams and data stay as they
        are, so that it goes on later with the numbers that it would have had. An engine that is
        closed resumes it.

        Args:
            timeout: how long to wait until it rests; by default not at all, None: as long as it
                takes. Not from the job's own callback, after which it rests.

        Returns:
            Whether it rests now.

        Raises:
            JobError: it has ended.
        """
        self._queue.request_suspension(self._job, suspended=True)
        return self._queue.wait_until_suspended(self._job, timeout)

    def resume(self) -> None:
        """Lets a suspended job go on, as soon as it fits beside the others.

        Raises:
            JobError: it has ended.
        """
        self._queue.request_suspension(self._job, suspended=False)

    def result(self, timeout: float | None = None) -> JobReport:
        """Waits for the job's end and returns its report, whatever that end was (`JobReport.ok`).

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
            JobError: a callback of the engine's waits for it without a timeout.
        """
        if not self._queue.wait_for_end(self._job, timeout):
            raise TimeoutError(f"job {self.name!r} has not ended within {timeout} seconds")
        return self._job.report


def as_completed(handles: Iterable[JobHandle], timeout: float | None = None) -> Iterator[JobHandle]:
    """The handles of submitted jobs, each as soon as its job has ended, however it has.

    Args:
        handles: of jobs of one engine or of several.
        timeout: seconds that all of it may take; None: as long as it takes.

    Raises:
        TimeoutError: some have not ended within `timeout` seconds.
        JobError: a callback of the engine's waits for them without a timeout.
    """
    left = list(dict.fromkeys(handles))
    until = None if timeout is None else time.monotonic() + timeout
    while left:
        remaining = None if until is None else max(0.0, until - time.monotonic())
        ended = _wait_for_some(left, remaining)
        if not ended and until is not None and time.monotonic() >= until:
            names = ", ".join(repr(handle.name) for handle in left[:5])
            raise TimeoutError(f"{len(left)} jobs have not ended within {timeout} s: {names}")
        left = [handle for handle in left if handle not in ended]
        yield from ended


#: How long one engine is waited for while others may have something, too.
_TURN_SECONDS = 0.02


def _wait_for_some(handles: list[JobHandle], timeout: float | None) -> list[JobHandle]:
    """Those whose jobs have ended; waits for one, and in a turn for the jobs of each engine."""
    queues = {handle._queue: None for handle in handles}
    if len(queues) > 1:
        timeout = _TURN_SECONDS if timeout is None else min(timeout, _TURN_SECONDS)
    ended: list[JobHandle] = []
    for queue in queues:
        own = {handle._job: handle for handle in handles if handle._queue is queue}
        ended += [own[job] for job in queue.wait_for_ends(list(own), timeout)]
    return ended
