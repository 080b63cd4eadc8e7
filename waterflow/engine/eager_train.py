"""Trains of eager steps: a job's own Python, one step after another, on the job's own thread.

What lies between two steps of a train is what lies between them in the plain loop, and next to
nothing else: the thread that fetches the job's data makes its steps and asks its callbacks, too, as
long as nobody else is to have the lane.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.engine.context import RunContext
from waterflow.engine.eager_steps import on_one_thread
from waterflow.engine.events import GroupsRan
from waterflow.engine.in_flight import drop_gradients
from waterflow.engine.job_run import JobRun
from waterflow.engine.user_loop import tell_nothing
from waterflow.executor.data.feeder import FeedItem
from waterflow.steps.prepared import PreparedBatch

#: A train gives the lane back after so many seconds; where all steps are eager, after more: each
#: handover of a lane costs as much as a small step. Not as long as it is to be seen how long
#: its operators are, or whether jobs lose side by side.
SLICE_SECONDS, _EAGER_SLICE_SECONDS = 0.02, 0.1
#: One that shows whether jobs lose side by side: as they do, most often, where steps are short.
_TRIAL_SECONDS = 0.01


def run_train(
    context: RunContext,
    job: JobRun,
    lane: int,
    fed: FeedItem[PreparedBatch],
    memory: AbstractContextManager[Any],
    may_go_on: Callable[[], bool],
    *,
    accounts: bool,
    beside: Callable[[], int],
) -> None:
    """Runs the job's step on this batch, and those that follow as long as they may.

    Args:
        context: the engine's.
        job: whose steps are eager, with room for them.
        lane: the calling thread's, which lends its place to the job's thread.
        fed: the batch of the first step.
        memory: inside, the thread's tensors come from the job's room.
        may_go_on: asked before each further step, on the job's thread.
        accounts: whether what a step has made and kept can be accounted for before the next one,
            since no plan counts on the memory as it is.
        beside: how many jobs are in eager steps now.
    """
    seconds = _EAGER_SLICE_SECONDS if accounts else SLICE_SECONDS
    if not job.eager.is_measured:
        seconds = SLICE_SECONDS
    elif beside() > 1 and not job.eager.knows_others:
        seconds = _TRIAL_SECONDS
    train = _Train(context, job, lane, memory, may_go_on, accounts, seconds)
    # No other lane works beside such a train: it stays on the core where its memory is.
    is_alone = accounts and job.eager.is_fine

    work = functools.partial(_run_on_own_thread, context, job, train, fed, beside)
    context.lend_lane(lane, job, work, moves=not is_alone)


def _run_on_own_thread(
    context: RunContext,
    job: JobRun,
    train: _Train,
    fed: FeedItem[PreparedBatch],
    beside: Callable[[], int],
) -> None:
    with job.eager.timed(beside), job.steps.persistent.gradients_lent():
        job.python.run(functools.partial(train.run, fed))
    with context.python:  # before this thread goes on, perhaps with a capture
        drop_gradients(context, job)


def account_for_room(context: RunContext, job: JobRun) -> None:
    """After eager steps in a room: what they have made and kept is accounted for, and what they
    have needed is told. A job for which there is no room ends."""
    with context.python:
        if not job.ended:
            context.run_isolated(job, job.account_for_room, context.residency)
        job.note_room()


class _Train:
    """One train; everything happens on the job's thread."""

    def __init__(
        self,
        context: RunContext,
        job: JobRun,
        lane: int,
        memory: AbstractContextManager[Any],
        may_go_on: Callable[[], bool],
        accounts: bool,
        seconds: float,
    ) -> None:
        self._accounts = accounts
        self._context = context
        self._job = job
        self._lane = lane
        self._memory = memory
        self._may_go_on = may_go_on
        self._until = time.perf_counter() + seconds
        # Steps that nobody has been told of: where nothing of the user's comes between two of them,
        # all are told of at once.
        self._losses: list[float] = []
        self._spans: list[tuple[Any, ...]] = []

    def run(self, fed: FeedItem[PreparedBatch]) -> None:
        self._job.loop.tell_of_steps = self._tell
        try:
            with on_one_thread():
                self._run(fed)
        finally:
            self._job.loop.tell_of_steps = tell_nothing
            self._tell()

    def _run(self, fed: FeedItem[PreparedBatch]) -> None:
        job = self._job
        at_once = job.steps.preparer.eager_at_once
        following: FeedItem[PreparedBatch] | None = fed
        while following is not None:
            self._step(following)
            as_found = not job.ended and job.eager.is_as_found
            if self._accounts and not (job.ended or as_found):
                self._account()
                as_found = not job.ended and job.eager.is_as_found
            job.feeder.step_done()
            goes_on = as_found and self._goes_on
            following = job.feeder.following(at_once) if goes_on else None

    def _account(self) -> None:
        """Between two steps, with the room's block given back: it held what now gets a place."""
        job = self._job
        self._tell()
        job.eager.close_room()
        account_for_room(self._context, job)
        if not job.ended:
            job.eager.open_room(self._context.lanes, 0)

    @property
    def _goes_on(self) -> bool:
        job = self._job
        if job.ended or job.is_called_away or time.perf_counter() > self._until:
            return False
        if job.steps.caller.is_outdated:  # by a callback on its caller's thread
            return False
        room = job.eager.room
        has_room = room is not None and room.is_open
        return has_room and self._may_go_on()

    def _step(self, fed: FeedItem[PreparedBatch]) -> None:
        job, batch = self._job, fed.item
        assert batch is not None
        if job.loop.epoch < fed.epoch:
            self._tell()
        started = time.perf_counter()
        try:
            with PYTHON_TURNS.shared():
                job.loop.enter_epoch(fed.epoch)
                rates = job.loop.rates()
                loss = job.eager.make(batch, self._memory)
        except BaseException as error:  # it ends this job alone
            self._tell()
            job.fail(error)
            return
        span = (self._lane, 0, 0, started, time.perf_counter())
        if job.loop.acts_between_steps:
            # In this order, as everywhere: whoever waits for his turn at Python keeps the lock.
            with self._context.python, PYTHON_TURNS.shared():
                self._context.events.publish(GroupsRan((job.name,), [span]))
                self._context.run_isolated(job, job.loop.finish_eager_step, loss, rates)
            return
        self._losses.append(loss)
        self._spans.append(span)
        if job.job.stop_on_nan and not math.isfinite(loss):
            self._tell()

    def _tell(self) -> None:
        """Tells of the steps that nobody has been told of."""
        job, losses, spans = self._job, self._losses, self._spans
        if losses:
            self._losses, self._spans = [], []
            with self._context.python:
                self._context.run_isolated(job, job.loop.finish_train, losses, spans)
