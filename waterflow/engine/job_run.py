"""A job inside the engine: its life from submission to the end."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from waterflow.account.account import Account
from waterflow.allocator_ext import _C
from waterflow.capture.callbacks import may_fetch_ahead
from waterflow.capture.own_error import own_error
from waterflow.capture.sharing import Sharing
from waterflow.checkpoint.cursor import DataCursor
from waterflow.checkpoint.job_state import Progress
from waterflow.common.errors import JobError
from waterflow.common.tracebacks import let_go_of_frames
from waterflow.common.units import format_bytes
from waterflow.engine.callbacks import CallbackLeftError, Callbacks
from waterflow.engine.captured_steps import CapturedSteps
from waterflow.engine.data_memory import DataMemory
from waterflow.engine.eager_steps import EagerSteps
from waterflow.engine.evaluator import Evaluator
from waterflow.engine.events import (
    CaptureKnown,
    EventStream,
    HeldBack,
    JobJoined,
    MemoryMoved,
    SpillPlanned,
    StateChanged,
)
from waterflow.engine.job_needs import JobNeeds
from waterflow.engine.job_python import JobPython
from waterflow.engine.on_step import OnStep
from waterflow.engine.states import JobState, transition
from waterflow.engine.user_loop import UserLoop
from waterflow.executor.data.batches import batches_of
from waterflow.executor.data.feeder import Feeder, FeedItem, Start
from waterflow.executor.device.storages import storage_key
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.executor.run.rng import JobRng
from waterflow.job.epochs import NumberedEpochs, by_step
from waterflow.job.job import Job
from waterflow.partitioner.policies.fair_share import Priority, Share
from waterflow.report.job_report import JobReport
from waterflow.steps.check_schedule import CheckSchedule
from waterflow.steps.eager_need import eager_need, largest_batch
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedBatch, Specialization
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.steps.side_by_side import SideBySide
from waterflow.steps.spilling import TIERS
from waterflow.steps.tiers import Tiers

Result = TypeVar("Result")
_Begin = Callable[[Any, int], Iterator[Any]]
"""Begins an epoch of a job's data, from the data and its number."""

#: Batches that a feeder holds: two, or more of small ones for steps that take next to no time, for
#: longer than a lane stays with a job: it begins no train of steps for what comes meanwhile.
LEAST_AHEAD, MOST_AHEAD = 2, 256
_AHEAD_BYTES = 1 << 20
_AHEAD_SECONDS = 0.04
#: What takes a fetch less than this is done before another thread has heard that it may begin.
_SHORT_FETCH_SECONDS = 0.0005


class Enough(NamedTuple):
    """A budget for a job by itself.

    Attributes:
        size: bytes.
        is_known: whether they are enough; else the job needs more, and nobody knows how much.
    """

    size: int
    is_known: bool

    @property
    def text(self) -> str:
        """For messages."""
        least = "" if self.is_known else "more than "
        return f"{least}{self.size} bytes ({format_bytes(self.size)})"


class JobRun:
    """A job in an engine: what it consists of there, and where it is in its life.

    Attributes:
        number: its number in the arena.
        job: what the user gave.
        name: the job's.
        report: what is known of it; written by the recorder.
        state: where it is in its life.
        ended: whether it will run no more.
        gives_way: whether it is to rest because it is others' turn in memory.
        most_capacity: bytes of the largest budget that it was there under and that became smaller.
        is_replanned: whether a thread plans its steps anew, while it rests.
        stop_requested: whether somebody wants it to end after its present step.
        memory_limit: bytes that it may need by its own limit, as it is now; None: any.
        priority: who goes before whom, and its share among equals (`weight`), as they are now.
        throttle: holds it back for the sake of guaranteed jobs.
        suspend_requested: whether somebody wants it to rest, from its present step's end on.
        resident: whether its persistent tensors have their places in the arena.
        is_parked: whether some may lie in host memory, where the device reads them slowly.
        python: runs its Python, but for steps.
        on_step: its callback.
        feeder: prepares its batches, on a thread of its own.
        captured, eager: its steps, by the way in which they run.
        evaluator: its evaluations.
        loop: what comes between its steps.
        data: the memory of its data.
        sharing: what it may have in common with other jobs.
        waited: that it has begun after another job for that reason; None where it has not.
        needs: what it needs of the arena.
        cursor: where it is in its data; None where nobody will ask.
        before_due: after how many more steps somebody wants a boundary, see `Feeder`.
        at_boundary: called at one, by whoever has the job to himself then.
    """

    def __init__(
        self,
        number: int,
        job: Job,
        seed: int,
        lanes: Lanes,
        captures: SharedCaptures,
        events: EventStream,
        on_ready: Callable[[bool], None],
        audit: str = "log",
        tiers: Tiers | None = None,
        *,
        throttle: Any = None,
        keeps_place: bool = False,
        resumed: Progress | None = None,
        limit: int | None = None,
        spill_to: str = TIERS[0],
        callbacks: Callbacks | None = None,
        side_by_side: SideBySide | None = None,
    ) -> None:
        """Args beyond the obvious.

        on_ready: called when its feeder has something, with whether it is not running yet.
        throttle: holds it back for the sake of guaranteed jobs; its own where nobody is to.
        keeps_place: whether its place in its data is to be known, so that it can be found again.
        resumed: where it goes on; its own objects are as they were then.
        limit: bytes that its steps are planned into; None: any.
        spill_to: where values are spilled to.
        callbacks: where its callbacks run; None: where its steps do.
        side_by_side: what all jobs have learnt of eager steps beside each other.
        """
        audit = job.audit or audit
        self.number = number
        self.job = job
        self.name = job.name
        self.report = JobReport(name=job.name, seed=seed)
        self.state = JobState.QUEUED
        self.ended = False
        self.stop_requested = False
        self.suspend_requested = False
        self.gives_way = False
        self.most_capacity = 0
        self.is_replanned = False
        self._waits_for: weakref.ref[JobRun] | None = None
        self.waited: str | None = None
        self._told = SpillPlanned(job.name, None, 0, 0, spill_to)
        self.priority = Priority[job.priority.upper()]
        self.weight = job.weight
        self.max_slowdown = job.max_slowdown
        self.memory_limit = job.limit_bytes
        self.throttle = throttle or _C.Throttle(_C.Precedence(), _C.Signal())
        self.resident = False
        self.is_parked = False
        self._events = events
        self._on_ready = on_ready
        self._device = lanes.device
        self._rng = JobRng(seed, lanes.device)
        self.before_due: Callable[[int, int], int] = lambda steps, most: most
        self.at_boundary: Callable[[], None] = lambda: None
        self.steps = JobSteps(
            *(job, lanes.device, self._rng, lanes.threads),
            captures=captures,
            tiers=tiers,
            limit=limit,
            spill_to=spill_to,
            keeps_captures=audit != "off",
        )
        self.needs = JobNeeds(self.steps)
        self.captured = CapturedSteps(number, self.steps, CheckSchedule(audit, job.total_steps))
        # Its parts know it weakly: its model and data are gone with the last who holds it, without
        # a garbage collection, which may be long in coming.
        caller = self.steps.caller
        self.python = JobPython(job.name, caller, self._rng, callbacks or Callbacks())
        self.on_step = OnStep(job, self.python, self.steps.cache, _Weakly(self._has_batch))
        self._submitted_data = job.data
        self.data = DataMemory(job.name, job.data)
        self.sharing = Sharing(job)
        self.eager = EagerSteps(
            *(number, self.steps, self.captured, self.needs, _Weakly(self._at_home), events),
            *(self.data, side_by_side or SideBySide()),
        )
        self.loop = UserLoop(
            *(job, self.python.in_turn, _Weakly(self.end), events, self.on_step.call)
        )
        self.loop.check_epoch = _Weakly(self._check_epoch)
        self.evaluator = Evaluator(
            *(number, job, self._rng, self.python.call_back), captures.evaluation_extents
        )
        #: What it was found from: captures, the steps at the latest evaluation, what steps read.
        self._data_is_apart: tuple[tuple[int, int, list[Account]], bool] = (0, -1, []), False
        start = self._go_on_from(resumed)
        begin: _Begin = functools.partial(_begin_epoch, job)
        self.cursor: DataCursor | None = None
        if keeps_place or resumed is not None:
            position = None if resumed is None else resumed.position
            self.cursor = DataCursor(job, self._rng, begin, position)
            begin = self.cursor.begin
        self.feeder = self._new_feeder(lanes, begin, start)
        events.publish(JobJoined(job.name, number, job.total_steps, self.report))

    def _new_feeder(self, lanes: Lanes, begin: _Begin, start: Start) -> Feeder[PreparedBatch]:
        """What fetches its data; see `Feeder` for `begin` and `start`."""
        job, preparer = self.job, self.steps.preparer
        return Feeder(
            _own_loader(job.data),
            preparer.prepare,
            _Weakly(self._fetch),
            epochs=job.epochs,
            steps=job.steps,
            may_run_ahead=_Weakly(self.may_fetch_ahead),
            enter_epoch=self.loop.enter_epoch,
            adopt_thread=lanes.adopt_helper,
            roam=lanes.roam,
            on_ready=_Weakly(self._tell_ready),
            name=job.name,
            prepares_at_once=None if self._device.queues else preparer.all_at_once,
            ahead=_Weakly(self.batches_ahead),
            begin=begin,
            start=start,
            before_due=_Weakly(self._before_boundary),
            rests_at_ends=self.loop.at_found_ends,
        )

    def _go_on_from(self, resumed: Progress | None) -> Start:
        """Where its feeder begins; what the job has done before is known from now on."""
        if resumed is None:
            return Start()
        position = resumed.position
        self._rng.restore(position.now.own)
        self.loop.go_on_from(position.epoch, position.steps, resumed.latest_loss)
        self.report.seed = resumed.seed
        self.report.losses[:] = resumed.losses
        self.report.metrics |= {name: [*values] for name, values in resumed.metrics.items()}
        self.report.steps = self.report.resumed_steps = position.steps
        self.report.epochs = resumed.epochs
        self.report.epoch_ends[:] = resumed.epoch_ends
        self.report.evaluations[:] = resumed.evaluations
        return Start(position.steps, position.epoch, position.batches)

    # Its Python

    def at_home(self, function: Callable[[], Result]) -> Result:
        """Runs what follows a step on the job's own thread, but where callbacks are made on the
        caller's, or lanes have streams of a device."""
        away = self._device.queues or self.python.calls_back_elsewhere
        return function() if away else self._lent(function)

    def _at_home(self, function: Callable[[], Result]) -> Result:
        """The same for steps, on the job's own thread: Python may keep things by thread. Not where
        lanes have streams of a device, on which steps have to be queued."""
        if self._device.queues:
            return self.python.in_turn(function)
        return self._lent(functools.partial(self.python.in_turn, function))

    def _lent(self, function: Callable[[], Result]) -> Result:
        """What a function returns on the job's own thread."""
        returned: list[Result] = []
        self.feeder.lend(functools.partial(_into, returned, function))
        return returned[0]

    def _fetch(self, function: Callable[[], Result]) -> Result:
        return self.python.fetch(function, self.may_fetch_ahead)

    def _has_batch(self) -> bool:
        return self.next_batch() is not None

    def _check_epoch(self) -> None:
        """Before a new epoch: raises where the loop would read other batches than it gets."""
        self.data.check()
        if self.job.data is not self._submitted_data:
            raise JobError(
                f"job {self.name!r}: its data were replaced while it trains (by a "
                f"{type(self.job.data).__name__}), and it has been reading those that it was "
                "submitted with. Give it one object that yields other batches from some epoch on, "
                "or stop it and submit a new job"
            )

    def _tell_ready(self) -> None:
        self._on_ready(self.state is not JobState.RUNNING)

    def _before_boundary(self, steps: int, most: int) -> int:
        most = self.loop.before_due(steps, most)
        if steps or not most:
            return self.before_due(steps, most)
        return 1 + self.before_due(1, most - 1)  # before the first step only the loop wants one

    @property
    def fetches_in_turn(self) -> bool:
        """Whether each batch is fetched after the step before it, and sooner than one thread hears
        of another: then captured steps run on the thread that fetches."""
        if self.may_fetch_ahead() or self._device.queues:
            return False
        if self.python.calls_back_elsewhere and self.loop.acts_between_steps:
            return False  # whoever makes the callbacks is handed each step anyway
        return self.feeder.fetch_seconds < _SHORT_FETCH_SECONDS

    def may_fetch_ahead(self) -> bool:
        """Whether batches may be fetched before the steps before them."""
        return self.steps.preparer.draws_apart and self.data_is_apart

    def batches_ahead(self) -> int:
        """How many batches its feeder may hold: enough for the steps of a while, if they are small
        and on the host, where they take no place in the arena."""
        preparer = self.steps.preparer
        size, step = preparer.batch_bytes, self.captured.seconds_of(preparer.latest_step)
        if self._device.queues or not size or not step:
            return LEAST_AHEAD
        most = min(MOST_AHEAD, _AHEAD_BYTES // size, int(_AHEAD_SECONDS / step))
        return max(LEAST_AHEAD, most)

    def may_fetch_undrawn(self) -> bool:
        """The same of batches for which nothing is drawn, on the thread that makes the steps; asked
        before each of these fetches."""
        if self.job.on_step is None:
            return self.data_is_apart
        return self.on_step.may_select_ahead()

    @property
    def data_is_apart(self) -> bool:
        """Whether batches that are fetched before the steps before them are the same, and these
        steps, too."""
        cache, (known, is_apart) = self.steps.cache, self._data_is_apart
        found = cache.captures, self.loop.evaluated, cache.read()
        if known[:2] != found[:2] or not _are_same(known[2], found[2]):
            is_apart = may_fetch_ahead(self.job, cache.written(), found[2])
            self._data_is_apart = found, is_apart
        return is_apart

    # Its life

    @property
    def is_new(self) -> bool:
        """Whether nothing has been done for it yet."""
        return not self.feeder.started

    @property
    def has_begun(self) -> bool:
        """Whether it has begun a step here."""
        return self.captured.begun > 0

    @property
    def is_about_to_begin(self) -> bool:
        """Whether nothing but its data, or room, keeps it from its first step here."""
        waits = self.suspend_requested or self.is_held_back
        return not (self.has_begun or self.ended or waits)

    @property
    def is_held_back(self) -> bool:
        """Whether it is to begin when another job has left."""
        other = None if self._waits_for is None else self._waits_for()
        return other is not None and not (self.ended or other.is_gone)

    def wait_for(self, other: JobRun, reason: str) -> None:
        """It is to begin when the other job has left, for that reason; told of once, as hundreds
        may wait for each other."""
        self._waits_for = weakref.ref(other)
        if self.waited is None:
            self.waited = f"trained when job {other.name!r} had ended, as both have {reason}"
            self._events.publish(HeldBack(self.name, other.name, reason))

    def share_now(self, share: Share) -> Share:
        """Its share, by the weight and priority that it has now."""
        return Share(self.weight, share.used, self.priority)

    @property
    def is_to_rest(self) -> bool:
        """Whether it is to give up its memory, or to wait for it: somebody wants that, or it is
        others' turn."""
        return self.suspend_requested or self.gives_way

    @property
    def is_called_away(self) -> bool:
        """Whether it is to make no further step for now."""
        return self.stop_requested or self.is_to_rest

    @property
    def may_rest(self) -> bool:
        """Whether it could be suspended now: it runs, or has all that its first step needs."""
        return self.state is JobState.RUNNING or self._has_batch()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and left the arena."""
        return self.ended and not (self.resident or self.is_parked)

    def become(self, state: JobState, error: BaseException | None = None) -> None:
        """Goes on to another state of its life.

        Raises:
            TransitionError: that state cannot follow.
        """
        before, self.state = self.state, transition(self.name, self.state, state)
        self.ended = state.ended
        self._events.publish(StateChanged(self.name, before, state, error))

    def start(self) -> None:
        """Begins to prepare its first step."""
        self.become(JobState.PREPARING)
        self.feeder.start(self)

    def end(self, state: JobState, error: BaseException | None = None) -> None:
        """The job will run no more; whatever ends it later is too late."""
        if self.ended:
            return
        if error is None:
            state, error = self._as_checked(state)
        self.tell_of_capture()
        self._tell_of_spills()
        if self.steps.tiers is not None:
            self.steps.tiers.close()
        self.become(state, error)
        self.feeder.stop()

    def _as_checked(self, state: JobState) -> tuple[JobState, BaseException | None]:
        """The state in which it ends: not without an error where its numbers may not be right."""
        try:
            self.data.check()
        except JobError as error:
            return JobState.FAILED, error
        return state, None

    def fail(self, error: BaseException) -> None:
        """The job ends with an error; its traceback keeps no tensors alive."""
        let_go_of_frames(error)
        if isinstance(error, CallbackLeftError):
            self.end(JobState.STOPPED)
            return
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory and self.why_unspilled:
            error.args = (f"{error}{self.why_unspilled}",)
        self.end(JobState.OUT_OF_MEMORY if out_of_memory else JobState.FAILED, error)

    def fail_in_captured_step(self, error: BaseException, batch: PreparedBatch) -> None:
        """The same where a captured step has raised it: a graph knows no lines, so the job's own
        Python is asked what it says of the batch. Not with locks held that a callback may need."""
        asked = isinstance(error, Exception) and not isinstance(
            error, MemoryError | torch.OutOfMemoryError
        )
        if asked and batch.flat is not None and not (self.ended or self._device.queues):
            own = own_error(self.job, batch.flat, self._rng, self.steps.caller)
            if own is not None:
                error = own
        self.fail(error)

    def tell_of_needs(self) -> None:
        """Tells what the job needs and how much of it is captured, as far as is known."""
        self._events.publish(self.needs.known(self.name))
        self.tell_of_capture()
        self._tell_of_spills()

    def _tell_of_spills(self) -> None:
        """Tells what its limit makes its steps copy, where that is something else than before."""
        spiller, away = self.steps.spiller, self.steps.persistent.away_bytes
        known = SpillPlanned(self.name, spiller.limit, spiller.copied_bytes, away, spiller.tier)
        if known != self._told and (known.copied_bytes or self._told.copied_bytes):
            self._told = known
            self._events.publish(known)

    def tell_of_capture(self) -> None:
        """Tells how much of the job's step is captured, and why not all of it."""
        opacity, tiers = self.steps.opacity, self.steps.tiers
        captured = "eager" if tiers is not None and self.steps.cache.is_empty else "captured"
        if opacity.step is not None:
            captured = "opaque step" if opacity.is_proved else "eager"
        elif opacity.optimizer is not None:
            captured = "opaque optimizer"
        recaptures = self.steps.cache.recaptures.count
        reasons = [] if tiers is None or opacity.step is not None else tiers.reasons()
        notes, builder = list(opacity.notes), self.steps.builder
        notes[:0] = [self.waited] if self.waited else []
        took = builder.seconds, builder.shared_with
        self._events.publish(CaptureKnown(self.name, captured, notes, recaptures, reasons, *took))

    # Its limit

    def set_limit(self, limit: int | None, residency: Residency) -> None:
        """Plans its steps into another limit. Between steps only.

        Args:
            limit: bytes that it may need, taking its steps alone; None: any.
            residency: where it has its places.

        Raises:
            BudgetError: what one operator works on is more; nothing has changed.
            JobError: its steps run as eager Python that needs more, or the tier has no room;
                nothing has changed.
        """
        if limit is not None and self.captured.exclusive:
            need = self.needs.memory.alone_bytes
            if limit < need:
                raise self.eager.over_limit(limit, need)
            self.eager.close_room()  # the next one is opened within the limit
        former = self.steps.spiller.limit
        self._plan_into(limit, residency)
        problem = self.steps.spiller.problem
        if problem is not None:
            self._plan_into(former, residency)
            raise problem
        if limit is not None and self.steps.tiers is not None:
            self.steps.tiers.insists = True
        self.tell_of_needs()

    def _plan_into(self, limit: int | None, residency: Residency) -> None:
        away = self.steps.persistent.away
        with self.steps.cache.still():
            self.steps.spiller.problem = None
            self.steps.spiller.set_limit(limit)
        self.needs.measured_extent = 0  # of steps under another limit
        self.steps.cache.collect_persistent()
        self.captured.unbind()
        if not self.resident:
            return
        if away - self.steps.persistent.away:  # what comes back needs room in one piece
            residency.repack()
        try:
            self.account(residency)
        except torch.OutOfMemoryError:  # it is let in again where there is room
            self.gives_way = True
            self.suspend(residency)

    def check_limit(self) -> None:
        """Whether its steps keep to its limit, as far as is known.

        Raises:
            BudgetError: they cannot.
            JobError: they run as eager Python, and it holds more between them, or the tier has no
                room.
        """
        if self.steps.spiller.problem is not None:
            raise self.steps.spiller.problem
        held = self.needs.memory.persistent_bytes
        if self.memory_limit is not None and self.captured.exclusive and held > self.memory_limit:
            raise self.eager.over_limit(self.memory_limit, held)

    @property
    def knows_batches(self) -> bool:
        """Whether all batches are there already, so that the largest is known."""
        return isinstance(self.job.data, (list, tuple))

    def enough_bytes(self, batch: PreparedBatch | None = None) -> Enough:
        """A budget under which the job can run by itself, for messages: found out by eager steps on
        copies where it makes eager ones. Takes its time, and memory beside the budget.

        Args:
            batch: the one to ask for; the next one where it is not given.
        """
        known = self.needs.memory.alone_bytes
        fed = self.next_batch()
        asked = batch or (None if fed is None else fed.item)
        if asked is None:
            return Enough(known, is_known=True)
        largest = largest_batch(self.job, asked.batch)
        tiers = self.steps.tiers
        eagerly = tiers is not None and tiers.may_start_eagerly_in(known)
        eagerly = eagerly or self.captured.exclusive or asked.specialization is None
        if not eagerly and largest is asked.batch:
            return Enough(known, is_known=True)
        taken = None
        if not self._device.queues:
            taken = eager_need(self.job, largest, self._rng, self.steps.caller)
        if taken is None:
            return Enough(known, is_known=False)
        return Enough(max(known, self.steps.persistent.bytes + taken), is_known=True)

    @property
    def why_unspilled(self) -> str:
        """For messages: why a job that may spill does not."""
        reason = self.steps.opacity.reason
        if self.steps.spiller.limit is None or reason is None:
            return ""
        return f" Its steps cannot be spilled, since they run as eager Python: {reason}"

    @property
    def may_spill(self) -> bool:
        """Whether its steps can be planned into another limit now, as far as is known."""
        able = not (self._device.queues or self.captured.exclusive or self.steps.cache.is_capturing)
        return able and self.steps.spiller.may_spill

    # Steps that it makes no more

    def lay_aside(self, kinds: Iterable[Specialization]) -> None:
        """These of its steps do not count for now, as it does not make them. Between steps only."""
        fed = self.next_batch()
        wanted = None if fed is None or fed.item is None else fed.item.specialization
        aside = [kind for kind in kinds if kind is not wanted]
        self.needs.laid_aside |= frozenset(aside)
        for kind in aside:
            for step in kind.steps:
                step.compiled.unbind()
                self.captured.forget(step)

    @property
    def asks_for_laid_aside(self) -> bool:
        """Whether its next step is one of those after all."""
        if not self.needs.laid_aside:
            return False
        fed = self.next_batch()
        return (
            fed is not None
            and fed.item is not None
            and fed.item.specialization in self.needs.laid_aside
        )

    def take_up(self) -> None:
        """Its next step counts in any case."""
        if self.asks_for_laid_aside:
            fed = self.next_batch()
            assert fed is not None
            assert fed.item is not None
            self.needs.laid_aside -= {fed.item.specialization}

    # Its next step

    def next_batch(self) -> FeedItem[PreparedBatch] | None:
        """What the feeder has, None while it is still at work."""
        return self.feeder.peek()

    @property
    def may_step(self) -> bool:
        """Whether the job runs and has its next batch, or the end of its data."""
        return self.state is JobState.RUNNING and self._has_batch()

    def refresh(self, batch: PreparedBatch, residency: Residency) -> PreparedBatch:
        """The batch ready for a step as the user's Python is now; captured anew where it must be.

        Raises:
            CaptureError: it cannot be, and the job insists on capture.
        """
        batch = self.steps.preparer.refresh(batch)
        if self.captured.tensors_have_changed:
            self.account(residency)
        return batch

    def make_ready(self, residency: Residency) -> None:
        """Gives the captured step of the next batch its tensors, where nothing else keeps it from
        being checked on a lane, beside other jobs' steps.

        Raises:
            JobError: as `CapturedSteps.choose`.
            torch.OutOfMemoryError: there is no room for what an eager step has kept.
        """
        fed = self.next_batch()
        if fed is None or fed.item is None or fed.item.specialization is None:
            return
        if not self.captured.lacks_tensors(fed.item.specialization):
            return  # asked of all jobs at each turn, so this comes first
        if self._device.queues or self.gives_way or fed.epoch != self.loop.epoch:
            return
        cache = self.steps.cache
        if self.captured.exclusive or not (
            self.steps.persistent.state_holds() and cache.is_fresh(fed.item)
        ):
            return  # what is to be captured anew takes a round
        if cache.step_for(fed.item.specialization) is None:
            return
        cache.collect_for(fed.item.specialization)
        if self.captured.tensors_have_changed:
            self.account(residency)
        self.captured.choose(fed.item, residency)

    @property
    def next_is_eager(self) -> bool:
        """Whether its next batch was prepared for a step in the user's Python."""
        fed = self.next_batch()
        return fed is not None and fed.item is not None and fed.item.specialization is None

    @property
    def can_flow(self) -> bool:
        """Whether its next step needs nothing but its lane, as far as is known by now."""
        if self.state is not JobState.RUNNING:
            return False
        fed = self.next_batch()
        if fed is None or fed.boundary:  # it flows with the others when its data comes
            captured = bool(self.captured.steady)
            partly = self.steps.opacity.optimizer is not None  # its graphs leave gradients behind
            flows = captured or (self.eager.has_room and not partly)
            settled = fed is None or (self.eager.is_as_found and not self._device.queues)
            return flows and settled
        if fed.item is None:
            return False
        ready = self.captured.ready_step(fed.item) is not None
        return ready or self.eager.needs_lane_only(fed.item)

    # Its tensors in the arena

    def move_in(self, residency: Residency) -> None:
        """Gives the persistent tensors their places in the arena."""
        self.resident = True
        self._park_away(residency)
        self.steps.persistent.users = residency.users
        residency.move_in(self.number, self.steps.persistent.all())
        self._events.publish(MemoryMoved(self.name, self.steps.persistent.bytes))

    def account(self, residency: Residency) -> None:
        """After a step of eager Python: what it has made and kept, or replaced, is accounted for.

        Before user code looks: afterwards tensors that are kept in place have another address.

        Raises:
            torch.OutOfMemoryError: there is no room for them.
        """
        self.steps.cache.collect_persistent()
        self._account_for_collected(residency)

    def _account_for_collected(self, residency: Residency) -> None:
        if self.captured.tensors_have_changed:
            self.captured.unbind()
        self._park_away(residency)
        away = {storage_key(tensor) for tensor in self.steps.persistent.all_away()}
        made = [
            tensor
            for tensor in self._made_by_step()
            if residency.counts(tensor) and storage_key(tensor) not in away
        ]
        made += self._gradients_left()
        residency.keep_only(self.number, [*self.steps.persistent.all(), *made])

    def _gradients_left(self) -> list[torch.Tensor]:
        """The gradients that a step of the user's own has left, whoever else has them."""
        return [] if self.job.step is None else self._gradients()

    def _gradients(self) -> list[torch.Tensor]:
        return list(_tensors_in([parameter.grad for parameter in self.job.root.parameters()]))

    def _park_away(self, residency: Residency) -> None:
        """What is in the arena only while a step needs it takes no memory of the device either."""
        away = self.steps.persistent.all_away()
        if away:
            residency.park(away)
            self.is_parked = True

    def account_for_room(self, residency: Residency) -> None:
        """The same after eager steps in a room, where they have made or replaced something.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        if not self.eager.is_as_found:
            before = residency.held(self.number)
            self.steps.cache.collect_persistent()
            self.eager.leave_room([*self.steps.persistent.all(), *self._gradients_left()])
            self._account_for_collected(residency)
            self.eager.note_kept(residency.held(self.number) - before)

    def note_room(self) -> None:
        """Tells what eager steps in a room have needed, where that is more than before."""
        if not self.eager.note_extent():
            return
        if self.steps.tiers is not None:
            self.steps.tiers.note_need(self.needs.memory.alone_bytes)
        self.tell_of_needs()

    def note_evaluation(self) -> None:
        """Tells what its evaluations need, where that is more than before."""
        if self.evaluator.extent > self.needs.evaluation_extent:
            self.needs.evaluation_extent = self.evaluator.extent
            self.tell_of_needs()

    def move_out(self, residency: Residency) -> None:
        """Gives up the places of a job that has ended; its tensors are in ordinary memory again.

        Its Python may have left objects that raise when they are looked at. What is found by way of
        them stays where it is, and keeps its memory; what had a place goes all the same.
        """
        with contextlib.suppress(Exception):
            self.eager.forget_gradients()
        if self.resident:
            self._give_up_places(residency)
        if self.is_parked:
            tensors = [*self._own_tensors(), *self.steps.persistent.all_away()]
            residency.unpark([*tensors, *_as_far_as_possible(self._known_tensors())])
            self.is_parked = False

    def suspend(self, residency: Residency) -> None:
        """Gives up the job's places until it is resumed. Between steps only, where a job holds
        least; its gradients stay, as the next step may read them."""
        if self.resident:
            self._give_up_places(residency, park=True)
            self.is_parked = True
        self.become(JobState.SUSPENDED)

    def _give_up_places(self, residency: Residency, park: bool = False) -> None:
        self.report.peak_bytes = residency.peak(self.number)
        self.captured.release()
        self.eager.retire_room()
        self.evaluator.retire_room()
        if self.steps.prefetcher is not None:
            self.steps.prefetcher.close(residency)
        known = _as_far_as_possible(self._known_tensors())
        residency.move_out(self.number, self._own_tensors(), known, park=park)
        self.resident = False
        self._events.publish(MemoryMoved(self.name, 0))

    def _made_by_step(self) -> Iterator[torch.Tensor]:
        """What else than parameters, buffers and plain state outlives a step."""
        yield from _tensors_in(dict(self.job.optimizer.state))
        yield from self._gradients()
        if self.steps.prefetcher is not None and self.steps.prefetcher.block is not None:
            yield self.steps.prefetcher.block

    def _own_tensors(self) -> list[torch.Tensor]:
        with contextlib.suppress(Exception):
            self.steps.cache.collect_persistent()  # an eager step may have replaced some
        return [*self.steps.persistent.all(), *_as_far_as_possible(self._made_by_step())]

    def _known_tensors(self) -> Iterator[torch.Tensor]:
        for module in self.job.root.modules():
            yield from _tensors_in(vars(module))


class _Weakly(Generic[Result]):
    """A bound method that does not keep its object: whoever calls it does."""

    __slots__ = ("_function", "_owner")

    def __init__(self, method: Callable[..., Result]) -> None:
        self._owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
        self._function = method.__func__  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Result:
        owner = self._owner()
        assert owner is not None
        return self._function(owner, *arguments)  # type: ignore[no-any-return]


def _as_far_as_possible(found: Iterator[Result]) -> list[Result]:
    """What there is, until it raises."""
    before: list[Result] = []
    with contextlib.suppress(Exception):
        before.extend(found)  # which keeps what comes before an error
    return before


def _into(returned: list[Result], function: Callable[[], Result]) -> None:
    returned.append(function())


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _own_loader(data: Iterable[Any]) -> Iterable[Any]:
    """Workers that stay from epoch to epoch serve one iteration at a time: each job has its own."""
    if type(data) is not DataLoader or not data.persistent_workers:
        return data
    own = copy.copy(data)
    own._iterator = None
    return own


def _begin_epoch(job: Job, data: Iterable[Any], number: int) -> Iterator[Any]:
    begun = data.epoch(number) if isinstance(data, NumberedEpochs) else batches_of(data)
    return by_step(begun, job.accumulate)


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and type(value).__name__ != "FakeTensor":
            yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, depth - 1)
