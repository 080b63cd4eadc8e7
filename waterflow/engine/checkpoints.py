"""A run's checkpoints: when each job's is due, its snapshot at a boundary, the way back.

A snapshot is taken where the plain loop would fetch its next batch: all steps are done, and the
feeder holds back. Whoever has the job then, a lane or the engine's thread, copies it; a thread of
its own writes the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike

from waterflow.checkpoint.cursor import check_can_be_positioned
from waterflow.checkpoint.interval import Interval
from waterflow.checkpoint.job_state import RUNNING, Progress, take
from waterflow.checkpoint.model import Attributes, attributes_of
from waterflow.checkpoint.resume import give, read_for
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.checkpoint.writer import SnapshotWriter
from waterflow.common.errors import CheckpointError, CheckpointWarning, JobError
from waterflow.engine.context import RunContext
from waterflow.engine.events import CheckpointWritten, Event, MemoryMoved
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.states import JobState
from waterflow.job.job import Job

Folder = str | PathLike[str]

DEFAULT_EVERY = "5min"

#: No snapshot is begun on time's account while so many are not yet on disk: they take memory.
_MOST_WAITING = 2

_ENDS = {JobState.FINISHED: "finished", JobState.STOPPED: "stopped"}
_STATES = {word: state for state, word in _ENDS.items()}


def snapshot(run: JobRun, before: Attributes, state: str = RUNNING) -> JobSnapshot:
    """A job as it is at a boundary, or after its end; nothing of it changes with the job.

    Args:
        run: nobody else's for now. With a cursor.
        before: the plain attributes of its model when it was submitted.
        state: "running", "finished" or "stopped".

    Raises:
        CheckpointError: it holds something that JSON and tensors cannot; names the field.
    """
    assert run.cursor is not None
    place, loop = run.feeder.place, run.loop
    if state == RUNNING and place.steps != loop.steps:
        raise RuntimeError(f"{place.steps} batches were drawn and {loop.steps} steps made")
    position = run.cursor.position(loop.steps, place.epoch, place.batches, float(loop.latest_loss))
    report = run.report
    progress = Progress(
        *(report.seed, position, list(report.losses), report.epochs, state),
        metrics=dict(report.metrics),
        evaluations=list(report.evaluations),
        epoch_ends=list(report.epoch_ends),
    )
    taken = run.python.look(lambda: take(run.job, progress, before))
    return dataclasses.replace(taken, job=run.name)  # which a callback may call something else


class Checkpoints:
    """The checkpoints of one run: those that it goes on from, and those that it writes."""

    def __init__(
        self,
        jobs: Sequence[Job],
        checkpoint: Folder | None,
        every: float | str | None,
        resume: Folder | None,
        partly: bool = False,
    ) -> None:
        """Reads what there is to read, and gives it to the jobs.

        Args:
            jobs: of the run, as their users have built them.
            checkpoint: the folder to write to; None: nothing is written.
            every: how often, see `Interval`; None: every 5 minutes.
            resume: the folder to go on from; None: from the beginning. Where it is the one to write
                to and nothing is there yet, from the beginning, too.
            partly: whether jobs may be missing in `resume`, and begin, or in `jobs`, and stay.

        Raises:
            JobError: an argument cannot be used, or a job's data cannot be positioned.
            CheckpointError: a checkpoint cannot be used. No job has been changed.
        """
        if checkpoint is None and every is not None:
            raise JobError(
                f"checkpoint_every={every!r} says how often, but no checkpoint= says where to"
            )
        for job in jobs:
            check_can_be_positioned(job)
        self._every = Interval.parse(DEFAULT_EVERY if every is None else every)
        self._folder = None if checkpoint is None else CheckpointFolder(checkpoint)
        self._names = [job.name for job in jobs]
        self._before = {job.name: attributes_of(job.root) for job in jobs}
        found = _snapshots(jobs, self._folder, resume, partly)
        self.resumed = give(jobs, found)
        is_there = resume is not None and self._folder == CheckpointFolder(resume)
        self._loaded = [] if is_there else list(found.values())  # to be written first
        self._context: RunContext | None = None
        self._queue: JobQueue | None = None
        self._writer: SnapshotWriter | None = None
        self._lock = threading.Lock()  # guards what follows
        self._runs: dict[str, JobRun] = {}
        self._next: dict[str, float] = {}  # when each is due: a time, or the steps that it is not
        self._given_up: set[str] = set()
        self._stopping: set[str] = set()
        self._warned = False  # of the folder

    @property
    def are_written(self) -> bool:
        """Whether this run writes checkpoints."""
        return self._folder is not None

    # From the engine

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Inside, checkpoints can be written; at the end all that were taken are on disk."""
        if self._folder is None:
            yield
            return
        with self._folder.opened(self._names):
            self._writer = SnapshotWriter(self._folder, self._note_written, self._note_failed)
            try:
                while self._loaded:
                    self._writer.put(self._loaded.pop())
                yield
            finally:
                self._writer.close()

    def serve(self, context: RunContext, queue: JobQueue) -> None:
        """The engine that takes them."""
        self._context, self._queue = context, queue
        if self._folder is not None:
            context.events.subscribe(self._see_end, MemoryMoved)

    def enter(self, run: JobRun) -> None:
        """A job was submitted; one that had ended has ended."""
        resumed = self.resumed.get(run.name)
        if resumed is not None and resumed.state != RUNNING:
            run.become(JobState.PREPARING)
            run.end(_STATES[resumed.state])
            return
        if self._folder is not None:
            self._runs[run.name] = run
            self._next[run.name] = self._next_time()
            run.before_due = functools.partial(self._before_due, run)
            run.at_boundary = lambda: self._at_boundary(run)

    def stop(self, run: JobRun) -> bool:
        """Has the job end after a checkpoint; returns whether that is going to happen."""
        with self._lock:
            takes = run.name in self._runs and run.name not in self._given_up
            if not takes or run.state is not JobState.RUNNING:
                return False
            self._stopping.add(run.name)
            return True

    def _next_time(self) -> float:
        seconds = self._every.seconds
        return math.inf if seconds is None else time.monotonic() + seconds

    def _before_due(self, run: JobRun, steps: int, most: int) -> int:
        name, writer = run.name, self._writer
        if writer is None or name in self._given_up:
            return most
        if name in self._stopping:
            return 0
        if self._every.steps is not None:
            left = -steps % self._every.steps
            has_been = left == 0 and self._next[name] == steps
            return min(most, self._every.steps if has_been else left)
        late = time.monotonic() >= self._next[name]
        due = late and not writer.is_busy_with(name) and writer.backlog < _MOST_WAITING
        return 0 if due else most

    def _at_boundary(self, run: JobRun) -> None:
        if run.ended:
            return
        self._take(run)
        self._next[run.name] = (
            self._next_time() if self._every.steps is None else run.feeder.place.steps
        )
        with self._lock:
            stops = run.name in self._stopping
        if stops:
            assert self._queue is not None
            self._queue.request_stop(run)

    def _see_end(self, event: Event) -> None:
        """A job has left the arena: how it has ended is its last checkpoint."""
        assert isinstance(event, MemoryMoved)
        run = self._runs.get(event.job)
        if run is None or event.held or run.name in self._given_up:
            return
        state = _ENDS.get(run.state)
        if state is not None and not (run.state is JobState.STOPPED and run.stop_requested):
            self._take(run, state)

    def _take(self, run: JobRun, state: str = RUNNING) -> None:
        assert self._writer is not None
        try:
            self._writer.put(snapshot(run, self._before[run.name], state))
        except Exception as error:
            with self._lock:
                self._given_up.add(run.name)
            _warn(
                f"{error}. The job goes on, without checkpoints from here on"
                if isinstance(error, CheckpointError)
                else f"job {run.name!r}: no checkpoint could be taken, {error!r}. The job goes on, "
                "without checkpoints from here on"
            )

    # From the writer's thread

    def _note_written(self, kept: JobSnapshot, size: int, seconds: float) -> None:
        self._warned = False
        if self._context is not None:
            event = CheckpointWritten(kept.job, kept.steps, size, seconds)
            self._context.events.publish(event)

    def _note_failed(self, kept: JobSnapshot, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _warn(
                f"job {kept.job!r}: its checkpoint after {kept.steps} steps could not be written "
                f"to {self._folder}: {error}. Training goes on, and the former checkpoint stays; "
                "it will be tried again. Make room there"
            )


def _snapshots(
    jobs: Sequence[Job], folder: CheckpointFolder | None, resume: Folder | None, partly: bool
) -> dict[str, JobSnapshot]:
    """What there is to go on from; nothing is lost of what is in the folder to write to."""
    source = None if resume is None else CheckpointFolder(resume)
    if folder is not None and folder.exists and folder != source:
        raise CheckpointError(
            f"{folder} holds the checkpoints of a run already: give resume={str(folder)!r} to go "
            "on with it, or checkpoint= another folder"
        )
    if source is None or (source == folder and not source.exists):
        return {}
    return read_for(jobs, source, partly)


def _warn(text: str) -> None:
    with contextlib.suppress(Warning):  # filters may turn it into an error, which ends no job
        warnings.warn(text, CheckpointWarning, stacklevel=3)
