"""Trains: steps of one job that a lane runs one after another, as long as nobody needs it to stop.

Where nothing of the user's comes between them, many steps are one call of the extension, which
looks at Python's state before the first and comes back at once when somebody calls
(`RunContext.calls`). Where Python of the user's comes after each step, it is one call a step, and
the thread stays in the job's context meanwhile: to enter that for each callback takes as long as a
small step. For devices on which a step is done when its call returns: elsewhere one step is in
flight at most.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from waterflow.allocator_ext import _C
from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.engine.captured_steps import Watched
from waterflow.engine.context import RunContext
from waterflow.engine.in_flight import ScheduledStep, StepsInFlight
from waterflow.engine.job_run import MOST_AHEAD, JobRun
from waterflow.engine.user_loop import Between
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.plan.flow_plan import FlowPlan
from waterflow.steps.prepared import PreparedBatch

#: After this time a lane looks who else waits for it, and at Python's state. Nothing of the job's
#: own comes between two steps of a train, so only another thread can change what was looked at, and
#: the loop itself answers to that at some step. A look takes the interpreter's lock: beside another
#: lane each made a guaranteed job wait for 0.1 to 0.2 ms.
SLICE_SECONDS = 0.032

#: A lane lent to a job's thread is taken back when that has waited so long for the job's data:
#: longer than a slice, as whoever waits wakes on the core on which that thread works.
_PATIENCE_SECONDS = 1.25 * SLICE_SECONDS

Fed = FeedItem[PreparedBatch]


class _Slice(NamedTuple):
    """A job's time on a lane.

    Attributes:
        lane: the calling thread's.
        job: nobody else's meanwhile.
        seen: the calls (`RunContext.calls`) that the lane has seen to.
        until: when it is over.
        at_home: whether the thread is the one that fetches the job's batches.
        first_kind: how a train's first step is unlike others: it may begin an epoch.
    """

    lane: int
    job: JobRun
    seen: int
    until: float
    at_home: bool
    first_kind: int = 0


class _Ran(NamedTuple):
    """What has become of a train.

    Attributes:
        seconds: that its steps took of the lane.
        may_go_on: whether the job's next step may follow.
    """

    seconds: float
    may_go_on: bool


class Trains:
    """Runs the trains of one stretch."""

    def __init__(self, context: RunContext, plan: FlowPlan, in_flight: StepsInFlight) -> None:
        self._context = context
        self._plan = plan
        self._in_flight = in_flight
        self._epochs = WeakKeyDictionary[JobRun, int]()  # of each job's last train

    def run(self, lane: int, job: JobRun, fed: Fed, seen: int) -> tuple[Fed | None, float]:
        """Runs the captured step on a batch that was taken, and those on the batches behind it.

        Args:
            lane: the calling thread's.
            job: nobody else's until this returns.
            fed: the batch.
            seen: the calls (`RunContext.calls`) that the lane has seen to.

        Returns:
            A batch that needs more than the lane, after all, or None; and the seconds that steps
            have taken.
        """
        has_data = job.feeder.peek() is not None
        if not job.fetches_in_turn or (has_data and job.job.on_step is None):
            return self._run(lane, job, fed, seen, at_home=False)
        made: list[tuple[Fed | None, float]] = []
        work = functools.partial(self._run_into, made, lane, job, fed, seen)
        self._context.lend_lane(lane, job, work, patience=_PATIENCE_SECONDS)
        return made[0] if made else (None, 0.0)  # it waits for its data

    def _run_into(
        self,
        made: list[tuple[Fed | None, float]],
        lane: int,
        job: JobRun,
        fed: Fed,
        seen: int,
    ) -> None:
        made.append(self._run(lane, job, fed, seen, at_home=True))

    def _run(
        self, lane: int, job: JobRun, fed: Fed, seen: int, *, at_home: bool
    ) -> tuple[Fed | None, float]:
        """See `run`; `at_home`: on the thread that fetches the job's batches, each of which it
        fetches between two steps, as the loop does: no thread waits for another."""
        at = _Slice(lane, job, seen, time.perf_counter() + SLICE_SECONDS, at_home)
        busy, first, following = 0.0, fed, [fed]
        while following:
            (fed,) = following
            at = at._replace(first_kind=self._first_kind(job, fed))
            with self._context.python:
                begun = self._context.run_isolated(job, self._begin, job, fed)
            if begun is None:
                break
            if begun.value is None:
                if fed is first:
                    return fed, busy
                job.feeder.put_back([fed])  # whoever chooses next finds what it needs
                break
            if at_home and _most(begun.value) > 1:
                _fetch_behind(job)
            ran = self._run_inside(at, fed, begun.value)
            fetches = at_home and ran is None  # else it has looked for the next batch itself
            if ran is None:
                result = self._run_some(at, fed, begun.value)
                ran = _Ran(result.seconds, result.may_go_on)
            busy += ran.seconds
            if not (ran.may_go_on and self._may_go_on(at)):
                break
            following = job.feeder.take_while(_has_batch, 1)
            if fetches and not following:
                following = _fetched(job)
        return None, busy

    def _first_kind(self, job: JobRun, fed: Fed) -> int:
        """Of a train: whether it begins an epoch."""
        begins = self._epochs.get(job) != fed.epoch
        self._epochs[job] = fed.epoch
        return 2 if begins else 1

    def _begin(self, job: JobRun, fed: Fed) -> Watched | None:
        """What the steps' train is to watch; None where the step needs more than a lane."""
        assert fed.item is not None
        job.loop.enter_epoch(fed.epoch)
        between = job.loop.between
        again = job.captured.again(fed.item, between)
        step = job.captured.ready_step(fed.item) if again is None else again.step
        if step is None or not self._plan.has(step.compiled):
            return None
        job.feeder.note_shown()
        assert fed.item.specialization is not None
        return again or job.captured.watch(step, fed.item.specialization, between)

    def _run_some(self, at: _Slice, fed: Fed, watched: Watched) -> Any:
        """Runs one train and settles it."""
        job = at.job
        items, most = [fed], _most(watched)
        if most > 1:
            most = job.captured.before_check(watched.step, most)
            items += job.feeder.take_while(_same_step_as(fed), most - 1)
        rates = job.loop.rates() if job.loop.shows_rates else ()
        rested = float(job.throttle.rested_seconds)
        scheduled = watched.between is Between.NUMBERS and watched.look is not None
        call = self._call_scheduled if scheduled else self._call
        result = call(at, items, watched)
        made = len(result.losses)
        assert fed.item is not None
        rested = float(job.throttle.rested_seconds) - rested
        job.captured.count(fed.item, made, max(0.0, result.seconds - rested), result.worked)
        if result.met_change:
            job.captured.look_again(made)
        if made < len(items):
            job.feeder.put_back(items[made + (result.error is not None) :])
        batch = items[min(made, len(items) - 1)].item
        assert batch is not None
        self._in_flight.settle_train(ScheduledStep(job, watched.step, batch, rates), result)
        return result

    def _may_go_on(self, at: _Slice) -> bool:
        if at.job.ended or at.seen != self._context.calls.calls:
            return False
        return time.perf_counter() < at.until

    # With Python of the user's after each step

    def _run_inside(self, at: _Slice, fed: Fed, watched: Watched) -> _Ran | None:
        """Runs the step and those behind it, with what the user's Python does after each, in the
        job's context; None, with nothing done, where each is to be entered by itself."""
        job = at.job
        if watched.look is None or watched.between is not Between.PYTHON:
            return None
        if not (at.at_home or job.may_fetch_ahead()) or job.python.calls_back_elsewhere:
            return None
        outside = _C.ThreadState()
        return job.python.run(functools.partial(self._steps_inside, at, fed, watched, outside))

    def _steps_inside(self, at: _Slice, fed: Fed, watched: Watched, outside: Any) -> _Ran | None:
        job = at.job
        if job.steps.caller.opaque is not None:  # as is seen when it is entered
            return None
        train = self._train(at, [], watched, outside=outside)
        form, gate = self._plan.form_of(watched.step.compiled, at.lane), self._plan.gate
        most = job.captured.before_check(watched.step, MOST_AHEAD)
        is_same, rates = _same_step_as(fed), job.loop.rates()
        made, seconds, worked, rested = 0, 0.0, 0.0, float(job.throttle.rested_seconds)
        following = [fed]
        while following:
            (fed,), following = following, []
            batch = fed.item
            assert batch is not None
            assert batch.flat is not None
            train.set_batch(batch.flat.tensors)
            result = self._context.lanes.run_train(at.lane, form, gate, train)
            if result.met_change:
                job.feeder.put_back([fed])
                break
            made += len(result.losses)
            seconds += result.seconds
            worked += result.worked
            # In this order, as everywhere: whoever waits for his turn at Python keeps the lock.
            with self._context.python, PYTHON_TURNS.shared():
                scheduled = ScheduledStep(job, watched.step, batch, rates)
                self._in_flight.settle_train(scheduled, result)
            if made == most or not (result.may_go_on and self._may_go_on(at)):
                break
            following = job.feeder.take_while(is_same, 1)
            if at.at_home and not following:
                _fetch_behind(job)
                following = job.feeder.take_while(is_same, 1) or _fetched(job, is_same)
        assert fed.item is not None
        rested = float(job.throttle.rested_seconds) - rested
        job.captured.count(fed.item, made, max(0.0, seconds - rested), worked)
        if result.met_change:
            job.captured.look_again(made)
        return _Ran(seconds, result.may_go_on)

    def _call_scheduled(self, at: _Slice, items: Sequence[Fed], watched: Watched) -> Any:
        """The same with schedulers between steps, as far as these are known ahead; no trace beside
        it, which may put back what it finds changed."""
        captured = at.job.captured
        with PYTHON_TURNS.shared():
            foretold = captured.foretell(watched)
            if foretold is not None:
                return self._call(at, items[: foretold.steps], watched, foretold.schedule)
            return self._call(at, items[:1], captured.watch_one(watched))

    def _call(
        self, at: _Slice, items: Sequence[Fed], watched: Watched, schedule: Any = None
    ) -> Any:
        train = self._train(at, items, watched, schedule=schedule)
        form = self._plan.form_of(watched.step.compiled, at.lane)
        return self._context.lanes.run_train(at.lane, form, self._plan.gate, train)

    def _train(self, at: _Slice, items: Sequence[Fed], watched: Watched, **options: Any) -> Any:
        job = at.job
        batches = [item.item.flat.tensors for item in items]  # type: ignore[union-attr]
        return _C.Train(
            batches,
            watched.look,
            self._plan.beside,
            keeps_blocks=not self._context.check,
            signal=self._context.calls,
            seen=at.seen,
            seconds=at.until - time.perf_counter(),
            finite_only=job.job.stop_on_nan,
            first_kind=at.first_kind,
            **options,
        )


def _same_step_as(fed: Fed) -> Callable[[Fed], bool]:
    """Whether another batch is of the same epoch, and for the same step."""
    assert fed.item is not None
    epoch, wanted = fed.epoch, fed.item.specialization

    def is_same(other: Fed) -> bool:
        item = other.item
        return item is not None and item.specialization is wanted and other.epoch == epoch

    return is_same


def _most(watched: Watched) -> int:
    """How many steps a train may have."""
    return 1 if watched.look is None or watched.between is Between.PYTHON else MOST_AHEAD


def _has_batch(fed: Fed) -> bool:
    return fed.item is not None


def _is_ready(job: JobRun, fed: Fed) -> bool:
    return fed.item is not None and job.captured.ready_step(fed.item) is not None


def _fetched(job: JobRun, fits: Callable[[Fed], bool] | None = None) -> list[Fed]:
    """The next batch, fetched on the job's thread, as a list; an empty one where it does not fit,
    or, without `fits`, where its step needs more than the lane."""
    fed = job.feeder.following(job.steps.preparer.captured_at_once)
    if fed is None:
        return []
    if not (_is_ready(job, fed) if fits is None else fits(fed)):
        job.feeder.put_back([fed])
        return []
    return [fed]


def _fetch_behind(job: JobRun) -> None:
    """On the job's thread, before a step: fetches batches behind its own that can be had without
    drawing."""
    if job.feeder.peek() is not None:
        return
    count = job.feeder.undrawn(job.batches_ahead() - 1)
    if count and job.may_fetch_undrawn():  # which takes a walk to know
        job.feeder.fetch_undrawn(count)
