"""What happens while a simulation runs, written down."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import nan

import numpy as np

from waterflow.cluster.simulator.results import Results
from waterflow.cluster.spec import JobSpec
from waterflow.cluster.state import ClusterState, JobState


class Record:
    """By job, and by decision."""

    def __init__(self, jobs: Sequence[JobSpec]) -> None:
        self._jobs = tuple(jobs)
        count = len(jobs)
        self.places: list[tuple[int, ...]] = [()] * count  # where each job runs, also while moving
        self._start = array("d", [nan]) * count
        self._finish = array("d", [nan]) * count
        self._service = array("d", [0.0]) * count
        self._opportunistic = array("d", [0.0]) * count
        self._preemptions = array("q", [0]) * count
        self._migrations = array("q", [0]) * count
        self._resizes = array("q", [0]) * count
        self._changes: dict[int, list[tuple[float, int]]] = {}
        self._times = array("d")
        self._in_use = array("q")
        self._queue = array("q")

    def moment(self, state: ClusterState) -> None:
        """A decision was carried out."""
        self._times.append(state.now)
        self._in_use.append(state.available - state.free)
        self._queue.append(state.waiting)

    def left_place(self, job: JobState, now: float) -> None:
        """A moving job is off its GPUs; the time as opportunistic until now counts."""
        if job.opportunistic:
            self._opportunistic[job.spec.index] += now - job.since

    def changed(
        self, job: JobState, gpus: tuple[int, ...], opportunistic: bool, now: float
    ) -> None:
        """A job that was as `job` says runs on `gpus` from now on."""
        index = job.spec.index
        if job.gpus and job.opportunistic:
            self._opportunistic[index] += now - job.since
        before, self.places[index] = self.places[index], gpus
        if before and not gpus:
            self._preemptions[index] += 1
        elif before and len(before) == len(gpus) and before != gpus:
            self._migrations[index] += 1
        elif before and gpus and len(before) != len(gpus):
            self._resizes[index] += 1
        elif not before and gpus and np.isnan(self._start[index]):
            self._start[index] = now
        if len(before) != len(gpus):
            self._changes.setdefault(index, []).append((now, len(gpus)))

    def done(self, job: JobState, now: float) -> None:
        """A job is done."""
        index = job.spec.index
        if job.opportunistic:
            self._opportunistic[index] += now - job.since
        self.places[index] = ()
        self._finish[index] = now
        self._service[index] = job.service(now)
        self._changes.setdefault(index, []).append((now, 0))

    def results(
        self, policy: str, events: int, seconds: float, *, finished: bool, interrupted: bool
    ) -> Results:
        """All of it, as arrays."""
        jobs = self._jobs
        return Results(
            policy=policy,
            jobs=jobs,
            name=np.array([job.name for job in jobs]),
            submit=np.array([job.submit for job in jobs]),
            gpus=np.array([job.gpus for job in jobs]),
            start=np.array(self._start),
            finish=np.array(self._finish),
            service=np.array(self._service),
            preemptions=np.array(self._preemptions),
            migrations=np.array(self._migrations),
            resizes=np.array(self._resizes),
            opportunistic=np.array(self._opportunistic),
            times=np.array(self._times),
            gpus_in_use=np.array(self._in_use),
            queue_length=np.array(self._queue),
            gpus_over_time=self._changes,
            events=events,
            seconds_simulating=seconds,
            finished=finished,
            interrupted=interrupted,
        )
