"""Jobs that take turns in memory, under a policy with a quantum (Gandiva, section 3.2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

from waterflow.engine.admission import Admission
from waterflow.engine.events import EventStream, MemoryMoved
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.partitioner.policies import Policy
from waterflow.partitioner.policies.fair_share import Share, newcomer


class Turns:
    """Decides whose turn it is; the entrance has jobs leave and come. On the engine's thread, but
    for `are_over`."""

    def __init__(
        self, policy: Policy, queue: JobQueue, admission: Admission, events: EventStream
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._admission = admission
        self._shares: WeakKeyDictionary[JobRun, Share] = WeakKeyDictionary()
        # Since when they are those in memory and those that wait to be.
        self._since = time.perf_counter()
        self._inside: WeakSet[JobRun] = WeakSet()
        self._waiting: WeakSet[JobRun] = WeakSet()
        self._ends: float | None = None  # of the present turn, where somebody waits for it
        if policy.quantum is not None:
            events.subscribe(lambda _: self._count(), MemoryMoved)

    def are_over(self) -> bool:
        """Whether the present turn has ended, and somebody else wants the next one."""
        return self._ends is not None and time.perf_counter() >= self._ends

    def next(self) -> None:
        """Has jobs that are in memory give way to others, where a turn is over or room is free."""
        if self._queue.holds_admission:
            return
        if not self._queue.may_be_resized:
            self._give_up_waiting()
        if self._policy.quantum is None:
            self._fill([job for job in self._queue.jobs if job.gives_way and self._may(job)])
            return
        self._count()
        jobs = [job for job in self._queue.jobs if self._takes_part(job)]
        self._waiting = WeakSet(job for job in jobs if not job.resident)
        if not self._waiting:
            self._ends = None
            return
        now = time.perf_counter()
        if self._ends is None:
            self._ends = now + self._policy.quantum
        if now >= self._ends:
            self._ends = now + self._policy.quantum
            self._choose(jobs)
        else:
            self._fill(jobs)

    def _give_up_waiting(self) -> None:
        """Nobody will give a larger budget any more to jobs that wait for one: they are asked as if
        they were new, and end with an error that says what they need."""
        for job in self._queue.jobs:
            if job.gives_way and self._may(job) and not self._admission.fits_alone(job):
                job.gives_way = False

    def _may(self, job: JobRun) -> bool:
        """Whether it may have its place again, if there is one."""
        return not (job.ended or job.is_replanned)

    def _takes_part(self, job: JobRun) -> bool:
        """Whether it has what it needs to run, and may."""
        if not self._may(job) or job.stop_requested or job.suspend_requested:
            return False
        return job.resident or (job.next_batch() is not None and self._admission.fits_alone(job))

    def _count(self) -> None:
        """The time that has passed is that of the jobs that were in memory, if others waited for
        it. Whoever did neither has no more due than those who did."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        for job, share in list(self._shares.items()):
            if job.ended:
                del self._shares[job]
            elif job in self._inside and self._waiting:
                self._shares[job] = share.after(passed)
        there = self._inside | self._waiting
        least = min((share.used for job, share in self._shares.items() if job in there), default=0)
        for job, share in self._shares.items():
            used = share.used if job in there else max(share.used, least)
            self._shares[job] = job.share_now(share._replace(used=used))
        self._inside = WeakSet(job for job in self._queue.jobs if job.resident)

    def _share(self, job: JobRun) -> Share:
        if job not in self._shares:
            self._shares[job] = newcomer(job.weight, self._shares.values())
        return job.share_now(self._shares[job])

    def _choose(self, jobs: Sequence[JobRun]) -> None:
        chosen = self._policy.residents(
            [self._share(job) for job in jobs], lambda places: self._fit([jobs[i] for i in places])
        )
        for place, job in enumerate(jobs):
            self._let(job, place in chosen)

    def _fill(self, jobs: Sequence[JobRun]) -> None:
        """Room that has become free is for those of these jobs that have waited longest, before the
        turn is over, or where there are no turns and they gave way to a smaller budget."""
        inside = [job for job in self._queue.jobs if job.resident and not job.ended]
        outside = sorted((job for job in jobs if not job.resident), key=self._order)
        for job in outside:
            self._let(job, self._fit([*inside, job]))
            if not job.gives_way:
                inside.append(job)

    def _let(self, job: JobRun, is_next: bool) -> None:
        job.gives_way = not is_next
        if job.gives_way:
            self._admission.wait(job)

    def _order(self, job: JobRun) -> tuple[int, float]:
        share = self._share(job)
        return share.priority, share.used

    def _fit(self, jobs: Sequence[JobRun]) -> bool:
        *others, last = jobs
        return self._admission.fits_beside(last, [job.needs.memory for job in others])
