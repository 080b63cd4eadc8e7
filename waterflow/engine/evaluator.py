"""A job's evaluations: where their memory comes from, and that they change nothing of the job (a
host's own but the random streams).

An evaluation is the user's own Python on tensors that nobody has planned. Its tensors come from a
room of its own, as those of eager steps do, whose block is part of the budget: set aside while jobs
flow once it is known what one needs, of this job or of one like it, and enlarged where nobody is in
a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

from waterflow.executor.run.eager_room import EagerRoom
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.rng import JobRng
from waterflow.job.evaluation import Evaluated, evaluate, leaves_streams_alone
from waterflow.job.job import Job
from waterflow.steps.shared_captures import kind_of


class Evaluator:
    """Evaluates one job.

    Attributes:
        room: where its tensors come from; None before there is any, and on devices that queue,
            where they come from the arena while nobody is in a step.
        extent: bytes that an evaluation has needed at most.
    """

    def __init__(
        self,
        number: int,
        job: Job,
        rng: JobRng,
        python: Callable[[Callable[[], Any]], Any],
        extents: dict[Hashable, int],
    ) -> None:
        """Args beyond the obvious.

        python: runs a callback of the job's, in its caller's context and with its random streams.
        extents: what evaluations of the engine's jobs have needed at most, by the kind of job.
        """
        self._number = number
        self._job = job
        self._rng = rng
        self._python = python
        self._extents = extents
        self.room: EagerRoom | None = None
        self.extent = 0

    def open_room(self, lanes: Lanes, left: int) -> None:
        """Sets memory aside, where it is known how much, and `left` bytes remain for others."""
        need = 0 if self._job.evaluate is None else self._extents.get(self._kind, 0)
        if need:
            room = self._room_in(lanes)
            if not room.is_open:
                room.open(need, left)

    @functools.cached_property
    def _kind(self) -> Hashable:
        return kind_of(self._job)

    def _room_in(self, lanes: Lanes) -> EagerRoom:
        if self.room is None:
            self.room = EagerRoom(lanes, self._number)
        return self.room

    def close_room(self) -> None:
        """Gives that memory back. Between steps only."""
        if self.room is not None and self.room.is_open:
            self.room.close()

    def retire_room(self) -> None:
        """The job leaves."""
        if self.room is not None:
            self.room.retire()
            self.room = None

    def run_in_room(self, lanes: Lanes, make_room: Callable[[EagerRoom, int], bool]) -> Evaluated:
        """Evaluates the job beside other jobs' steps.

        Args:
            lanes: of the engine.
            make_room: enlarges a room by so many bytes; whether it has.

        Raises:
            torch.OutOfMemoryError: there is no room for its tensors.
            Whatever the user's function raises.
        """
        room = self._room_in(lanes)
        found = self.run_in(room.scope(lambda size: make_room(room, size)))
        self.extent = max(self.extent, room.peak)
        self._extents[self._kind] = max(self.extent, self._extents.get(self._kind, 0))
        return found

    def run_in(self, memory: AbstractContextManager[Any]) -> Evaluated:
        """Evaluates the job with its tensors from there.

        Raises:
            Whatever the user's function raises.
        """
        return self._python(functools.partial(self._run, memory))  # type: ignore[no-any-return]

    def _run(self, memory: AbstractContextManager[Any]) -> Evaluated:
        go_back = self._rng.mark() if leaves_streams_alone(self._job) else None
        touched = self._rng.touched
        try:
            with memory:
                return evaluate(self._job)
        finally:
            if go_back is not None:
                go_back()
            self._rng.touched = touched
