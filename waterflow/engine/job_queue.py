"""The jobs of an engine, and what other threads ask of it for them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from waterflow.allocator_ext import _C
from waterflow.common.errors import BudgetError, JobError
from waterflow.common.tracebacks import let_go_of_callers
from waterflow.common.worker_deaths import unless_a_worker_dies
from waterflow.engine.admission import Admission
from waterflow.engine.context import RunContext
from waterflow.engine.events import Event, ShareChanged, StateChanged
from waterflow.engine.job_run import JobRun
from waterflow.engine.states import JobState
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.report.job_report import JobReport

#: So many jobs, and no more, are prepared while they wait to begin: each has a thread, and a batch.
_MOST_PREPARED = 64


class Submitted(NamedTuple):
    """What stays of a job when it has left: thousands may pass through one engine.

    Attributes:
        number: its number in the arena.
        report: what is known of it.
    """

    number: int
    report: JobReport


class Wish:
    """What somebody wants done between steps, and what came of it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.error: Exception | None = None
        self.done = threading.Event()

    def grant(self) -> None:
        """Does it; an error is the asker's."""
        try:
            self._action()
        except (BudgetError, JobError) as error:
            self.error = error
        self.done.set()


class JobQueue:
    """What was submitted, in that order, and who waits for what.

    Attributes:
        submitted: all jobs that ever were, by their names.
        jobs: those that have not left, but for the backlog: their models, data and captures are
            held here. Never changed, but replaced, so that any thread may go through it.
        broken: what has ended the engine, if it is no single job's error.
        holds_admission: whether nobody may begin for now.
        is_due: whether something else is to be done between steps.
    """

    def __init__(self, context: RunContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission
        self.submitted: dict[str, Submitted] = {}
        self.jobs: Sequence[JobRun] = ()
        self._backlog: dict[JobRun, None] = {}  # those behind them that nothing was done for yet
        self._called: list[JobRun] = []  # of it, for whom something is to be done
        self._feeding: list[threading.Thread] = []  # of jobs that have left
        self.broken: BaseException | None = None
        self.holds_admission = False
        self.is_due: Callable[[], bool] = lambda: False
        self._wishes: list[Wish] = []
        self._errors: list[BaseException] = []  # of jobs that have left since somebody looked
        self._closing = False
        self._over = threading.Event()
        context.events.subscribe(self._wake_at_an_end, StateChanged)

    # From any thread

    @property
    def is_closed(self) -> bool:
        """Whether no more jobs are taken."""
        return self._closing or self.broken is not None

    @property
    def may_be_resized(self) -> bool:
        """Whether somebody may yet give the engine a larger budget: its user as long as he has not
        closed it, or a callback of a job in memory."""
        return not self.is_closed or any(job.resident for job in self.jobs)

    @property
    def everybody(self) -> Sequence[JobRun]:
        """All jobs that have not left, in the order of their submission."""
        with self._context.state:
            return (*self.jobs, *self._backlog)

    def add(self, job: JobRun) -> None:
        """A job was submitted. With the lock of the context's state held."""
        self.submitted[job.name] = Submitted(job.number, job.report)
        self._backlog[job] = None
        self._let_past(job)
        self._context.wake()

    def _let_past(self, job: JobRun) -> None:
        """Whoever goes before others that wait does not wait behind them."""
        waiting = (*(one for one in self.jobs if not one.has_begun), *self._backlog)
        if any(job.priority < one.priority for one in waiting):
            self._call_in(job)

    def _call_in(self, job: JobRun) -> None:
        """Something is to be done for the job, whose turn it is not yet."""
        if job in self._backlog:
            self._called.append(job)

    def release(self) -> None:
        """Lets jobs begin once all so far are prepared, but for the backlog, and each of them is
        known to fit alone.

        Raises:
            BudgetError: one of them does not; nothing has run.
        """
        self._wait(lambda: not self.may_take and all(map(self._is_prepared, self.jobs)), None)
        prepared = [job for job in self.jobs if not (job.ended or job.is_held_back)]
        if not all(map(self._admission.fits_alone, prepared)):
            raise BudgetError(self._admission.too_small(prepared))
        with self._context.state:
            self.holds_admission = False
            self._context.state.notify_all()

    def _is_prepared(self, job: JobRun) -> bool:
        decided = job.ended or job.is_held_back or self.broken is not None
        return decided or job.next_batch() is not None

    def request_stop(self, job: JobRun) -> None:
        """Has the job end after its present step."""
        with self._context.state:
            job.stop_requested = True
            self._call_in(job)
            self._context.wake()

    def set_share(
        self,
        job: JobRun,
        priority: str | None = None,
        weight: float | None = None,
        max_slowdown: float | None = None,
    ) -> None:
        """Gives the job another priority, weight or largest slowdown; None leaves it as it is."""
        with self._context.state:
            if priority is not None:
                job.priority = Priority[priority.upper()]
                self._let_past(job)
            if weight is not None:
                job.weight = weight
            if max_slowdown is not None:
                job.max_slowdown = max_slowdown
            priority = job.priority.name.lower()
            changed = ShareChanged(job.name, priority, job.weight, job.max_slowdown)
            self._context.events.publish(changed)
            self._context.wake()

    def request_suspension(self, job: JobRun, suspended: bool) -> None:
        """Has the job give up its memory after its present step, or go on as soon as it fits.

        Raises:
            JobError: it has ended, or nobody could resume it as the engine is closed.
        """
        with self._context.state:
            if suspended and self.is_closed:
                raise JobError(f"job {job.name!r}: the engine is closed and suspends no jobs")
            if job.ended or job.stop_requested:
                verb = "suspended" if suspended else "resumed"
                what = job.state.status if job.ended else "about to stop"
                raise JobError(
                    f"job {job.name!r} is {what} and cannot be {verb}; submit a new job with its "
                    "model and optimizer to train on"
                )
            job.suspend_requested = suspended
            self._call_in(job)
            self._context.wake()

    def wait_until_suspended(self, job: JobRun, timeout: float | None) -> bool:
        """Waits until the job rests, has not begun yet for another's sake, or has ended; returns
        whether it rests, within the timeout."""

        def rests() -> bool:
            return job.state is JobState.SUSPENDED or job.is_held_back

        def is_decided() -> bool:
            return rests() or job.is_gone or self._over.is_set()

        if timeout is None:
            self._context.callbacks.check_may_wait(f"job {job.name!r} to rest")
        self._wait(is_decided, timeout)
        return rests()

    def ask(self, action: Callable[[], None]) -> None:
        """Has something done on the engine's thread, while no step is under way; returns when it is
        done. On a thread of the engine's own, such as in a callback, at once.

        Raises:
            JobError: the engine has ended; or what the action raises.
            BudgetError: the action raises it.
        """
        wish = Wish(action)
        with self._context.state:
            if self._over.is_set() or self.broken is not None:
                raise JobError("the engine has ended; make a new one")
            self._wishes.append(wish)
            self._context.wake()
        here = threading.current_thread().name.startswith("waterflow-")
        if here or self._context.callbacks.job_here is not None:
            return
        self._wait(lambda: wish.done.is_set() or self._over.is_set(), None)
        if wish.error is not None:
            raise wish.error

    def waits_for_room(self, job: JobRun) -> bool:
        """Whether it could run but for the memory that others have."""
        return not job.ended and self._admission.is_waiting(job)

    def next_wish(self) -> Wish | None:
        """The first wish that has not been granted; None where all have."""
        with self._context.state:
            return self._wishes.pop(0) if self._wishes else None

    @property
    def has_wishes(self) -> bool:
        """Whether somebody wants something done between steps."""
        return bool(self._wishes)

    def wait_for_end(self, job: JobRun, timeout: float | None) -> bool:
        """Waits until the job has ended and left; returns whether it has, within the timeout."""
        return bool(self.wait_for_ends([job], timeout))

    def wait_for_ends(self, jobs: Sequence[JobRun], timeout: float | None) -> list[JobRun]:
        """Waits until one of the jobs has ended and left; returns those that have, none where that
        took longer than the timeout.

        Raises:
            JobError: it might wait for ever, in a callback.
        """

        def gone() -> list[JobRun]:
            return [job for job in jobs if job.is_gone or self._over.is_set()]

        _C.release_intra_op_threads()
        if timeout is None and not gone():
            names = ", ".join(repr(job.name) for job in jobs[:3])
            self._context.callbacks.check_may_wait(f"the end of {names}")
        self._wait(lambda: bool(gone()), timeout)
        return gone()

    def _wait(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Waits, and makes the callbacks that are the caller's to make; whether it is over."""
        until = None if timeout is None else time.monotonic() + timeout
        callbacks, state = self._context.callbacks, self._context.state
        while True:
            with state:
                left = None if until is None else max(0.0, until - time.monotonic())
                with unless_a_worker_dies():
                    self._context.outside.wait_for(lambda: is_over() or callbacks.is_asked, left)
                if is_over():
                    return True
                if not callbacks.is_asked:
                    if until is not None and time.monotonic() >= until:
                        return False
                    continue
            callbacks.serve()

    def close(self) -> None:
        """Takes no more jobs; those that are held back may begin, and those that rest go on."""
        _C.release_intra_op_threads()  # who closes waits next
        with self._context.state:
            self._closing = True
            self.holds_admission = False
            everybody = self.everybody
            if any(job.most_capacity for job in everybody):  # who may wait for a larger budget
                self._wishes.append(Wish(self._admission.somebody_left))
            for job in everybody:
                job.suspend_requested = False
            self._context.state.notify_all()

    def join(self, timeout: float) -> bool:
        """Waits for the end of the engine's work; returns whether it has come."""
        if self._context.callbacks.in_caller:
            return self._wait(self._over.is_set, timeout)
        return self._over.wait(timeout)

    # From the engine's thread

    def wait_for_work(self, pending: bool) -> bool:
        """Waits until something is to be done; returns False when nothing ever will be.

        Args:
            pending: whether there is something besides the jobs' own needs.
        """
        with self._context.state:
            self._context.state.wait_for(lambda: pending or self._has_work() or self._is_over())
            return not self._is_over()

    def _has_work(self) -> bool:
        due = self.has_wishes or self.may_take or self.is_due()
        return due or any(map(self.needs_attention, self.jobs))

    def _is_over(self) -> bool:
        return self._closing and not self._backlog and all(job.is_gone for job in self.jobs)

    @property
    def may_take(self) -> bool:
        """Whether jobs of the backlog are to be prepared: not one at a time, where there are many,
        as all that flow are stopped for them."""
        few = min(len(self._backlog), _MOST_PREPARED // 2)
        return bool(self._called) or 0 < few <= self._places

    @property
    def _places(self) -> int:
        """How many more jobs may be prepared."""
        return _MOST_PREPARED - sum(job.is_about_to_begin for job in self.jobs)

    def take_next(self) -> None:
        """Jobs of the backlog are to be prepared: as many as there are places for, and those that
        somebody has called in, with all before them: jobs that share something have their turn in
        the order of their submission. Those that are to end have none."""
        if not self.may_take:
            return
        with self._context.state:
            called, self._called = frozenset(self._called), []
            stopped = [job for job in called if job.stop_requested]
            going = called.difference(stopped)
            last = max((at for at, job in enumerate(self._backlog, 1) if job in going), default=0)
            first = itertools.islice(self._backlog, max(last, self._places, 0))
            taken = [job for job in {*first, *stopped} if job in self._backlog]
            taken.sort(key=lambda job: job.number)
            for job in taken:
                del self._backlog[job]
            self.jobs = (*self.jobs, *taken)
            self._context.outside.notify_all()  # who have ended need no more than that

    def needs_attention(self, job: JobRun) -> bool:
        """Whether the engine has something to do for the job between steps, or a step."""
        if job.ended:
            return job.resident
        if job.stop_requested or job.is_new:
            return job.stop_requested or not job.is_held_back
        if job.is_to_rest:
            if job.state is not JobState.SUSPENDED:
                return job.may_rest
            return not (job.suspend_requested or self._admission.is_waiting(job))
        if job.state is JobState.SUSPENDED:
            return True
        if job.next_batch() is None:
            return False
        if job.state is JobState.RUNNING:
            return True
        return not (self.holds_admission or self._admission.is_waiting(job))

    def remove_gone(self, among: Iterable[JobRun] | None = None) -> None:
        """Lets go of the jobs that have ended and left the arena, among these, or all."""
        with self._context.state:
            gone = {job for job in (self.jobs if among is None else among) if job.is_gone}
            if gone:
                self.jobs = tuple(job for job in self.jobs if job not in gone)
                self._errors += [job.report.exception for job in gone if job.report.exception]
                threads = [*self._feeding, *(job.feeder.thread for job in gone)]
                self._feeding = [thread for thread in threads if thread.is_alive()]

    def let_go_of_errors(self) -> None:
        """What the errors of jobs that have left keep alive of the engine's is theirs no longer, as
        far as it is not under way."""
        with self._context.state:
            errors, self._errors = self._errors, []
        for error in errors:
            let_go_of_callers(error)

    def join_feeders(self, timeout: float) -> None:
        """Waits for the threads that fetched the jobs' data, for each so many seconds."""
        for thread in [*self._feeding, *(job.feeder.thread for job in self.jobs)]:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout)

    def end(self) -> None:
        """No job will run any more."""
        self._over.set()
        self._context.wake()

    def _wake_at_an_end(self, event: Event) -> None:
        if isinstance(event, StateChanged) and event.after.ended:
            self._context.tell_of_end()
