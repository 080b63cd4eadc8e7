"""Writes snapshots on a thread of its own, so that those who train do not wait for a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder

Written = Callable[[JobSnapshot, int, float], None]
Failed = Callable[[JobSnapshot, Exception], None]


class SnapshotWriter:
    """One thread, one folder. Of a job that has a snapshot waiting, the later one counts."""

    def __init__(self, folder: CheckpointFolder, written: Written, failed: Failed) -> None:
        """Args beyond the obvious.

        written: called on the thread, with the bytes and seconds that one has taken.
        failed: called on the thread, where one could not be written.
        """
        self._folder = folder
        self._written = written
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: dict[str, JobSnapshot] = {}
        self._under_way: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="waterflow-checkpoints")
        self._thread.start()

    def put(self, snapshot: JobSnapshot) -> None:
        """Has a snapshot written in its turn."""
        with self._changed:
            self._waiting[snapshot.job] = snapshot
            self._changed.notify_all()

    def is_busy_with(self, job: str) -> bool:
        """Whether a snapshot of this job is not yet on disk."""
        return self._under_way == job or job in self._waiting

    @property
    def backlog(self) -> int:
        """Snapshots that are not yet on disk."""
        return len(self._waiting) + (self._under_way is not None)

    def close(self) -> None:
        """Waits until all is written, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            started = time.perf_counter()
            try:
                size = self._folder.write(snapshot)
            except Exception as error:
                self._failed(snapshot, error)
            else:
                self._written(snapshot, size, time.perf_counter() - started)
            with self._changed:
                self._under_way = None

    def _next(self) -> JobSnapshot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            job = next(iter(self._waiting))
            self._under_way = job
            return self._waiting.pop(job)
