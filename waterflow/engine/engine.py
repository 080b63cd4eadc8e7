"""The engine as users have it: takes jobs, co-trains them while they fit, reports."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common import forks, garbage
from waterflow.common.errors import BudgetWarning, DeviceLostError, JobError
from waterflow.common.text import printable
from waterflow.common.tracebacks import let_go_of_callers
from waterflow.common.units import format_bytes, parse_bytes
from waterflow.common.warn import Place, place_of_call, place_of_function, warn_at
from waterflow.common.worker_deaths import unless_a_worker_dies
from waterflow.engine.admission import Admission
from waterflow.engine.alarms import Alarms
from waterflow.engine.callbacks import CallbackLeftError, Callbacks, check_callbacks
from waterflow.engine.checkpoints import Checkpoints
from waterflow.engine.context import RunContext
from waterflow.engine.display import show_on
from waterflow.engine.event_iterator import EventIterator
from waterflow.engine.events import (
    EVENTS,
    BudgetChanged,
    EventStream,
    Kind,
    Subscriber,
    TrainRan,
    muted_by_errors,
)
from waterflow.engine.handle import JobHandle, check_job_priority
from waterflow.engine.job_queue import JobQueue
from waterflow.engine.job_run import JobRun
from waterflow.engine.loop import EngineLoop
from waterflow.engine.recorder import Recorder, versions
from waterflow.executor.device.base import Device
from waterflow.executor.device.select import get_device
from waterflow.executor.run import rng
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.job.job import Job, check_audit
from waterflow.job.training_step import draw_seed
from waterflow.partitioner import Policy, get_policy
from waterflow.partitioner.policies import TimeSlice
from waterflow.report.progress import Progress
from waterflow.report.report import Report
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.steps.spilling import TIERS, parse_tier
from waterflow.steps.tiers import CaptureCosts, Tiers
from waterflow.steps.tiers import are_on as tiers_are_on

#: What jobs still have to end in, where a process ends without closing its engine.
_LAST_SECONDS = 5.0

#: After Ctrl-C, what is said when steps or callbacks take so many seconds to end.
_PATIENCE_SECONDS = 2.0
_WAITING = (
    "waterflow: the run ends after the steps and callbacks under way; interrupt again to wait for "
    "nothing"
)


class Engine:
    """Co-trains jobs that come and go, under one memory budget.

    Use it as a context manager: leaving it waits for the jobs, or stops them where an exception
    leaves it.
    """

    def __init__(
        self,
        memory: int | str,
        *,
        device: str | Device = "cpu",
        policy: str | Policy = "flow",
        lanes: int | str = "auto",
        threads: int | None = None,
        progress: bool = False,
        check: bool = False,
        audit: str = "log",
        quantum: float | str | None = None,
        checkpoints: Checkpoints | None = None,
        spill: bool | str = False,
        callbacks: str = "lane",
    ) -> None:
        """Takes the budget.

        Args:
            memory: bytes that all jobs together may hold, or a text such as "512MiB".
            device: "cpu", "cuda" (torch's current device) or "cuda:1".
            policy: "flow", "time-slice", "waterwave", "waterwave-s", "temporal", or a policy of
                one's own.
            lanes: node groups that may run at once; "auto": two, and one after another wherever
                jobs have been seen to do more so.
            threads: intra-op threads of each lane; torch's count divided by the lanes, at least 1,
                if None.
            progress: show progress on stderr.
            check: record every memory event for `check_races` (costs memory, for tests).
            audit: how often captured steps are compared with eager ones, where a job does not say
                it: "log", "all" or "off", see `Job`.
            quantum: of the policy "time-slice": seconds, or a text such as "60s", after which jobs
                in memory give way to those that wait for room.
            checkpoints: those of `run`.
            spill: whether jobs that do not fit are planned into the memory there is, see `run`.
            callbacks: whose thread runs `on_step` and `evaluate`: "lane", one of the engine's, or
                "caller", the one that waits (`result`, `as_completed`, `close`, leaving the
                engine). As long as nobody waits, callbacks wait, too.

        Raises:
            JobError: an argument cannot be used; names it and the remedy.
        """
        self.budget = self._largest_budget = parse_bytes(memory)
        check_audit(audit)
        check_callbacks(callbacks)
        self._audit = audit
        self._spills = spill is not False
        self._spill_to = parse_tier(spill)
        where = get_device(device)
        undoes_packing = lanes == "auto"
        lanes = _number_of_lanes(lanes)
        self.policy = _policy(policy, quantum)
        if self._spill_to != TIERS[0] and where.queues:
            raise JobError(
                f"spill={spill!r} on {where.name}: there values go to page-locked host memory, "
                "which the device copies by itself, and not to a file: use spill=True"
            )
        self.device = where.name
        _warn_of_too_much(where, self.budget)
        default = torch.get_num_threads()
        self._lanes = Lanes(where, self.budget, lanes, _threads(threads, lanes, default), default)
        self._arena = self._lanes.arena
        self._arena.record(check)
        self._check = check
        self._interrupted = self._insists = False
        self._captures = SharedCaptures()
        self._costs = CaptureCosts(lanes)
        self._recorder = Recorder()
        residency = Residency(self._arena, where)
        calls = Callbacks(callbacks == "caller", (self._lanes.threads, default))
        self._context = RunContext(*(self._lanes, residency, EventStream(), check), callbacks=calls)
        self._context.events.subscribe(self._recorder, *EVENTS, TrainRan)
        if progress:
            display = Progress()
            display.start([])
            self._context.events.subscribe(show_on(display), *EVENTS, TrainRan)
        self._alarms = Alarms()
        self._context.events.subscribe(self._alarms, *Alarms.KINDS)
        capacity = int(self._arena.statistics().capacity)
        self._context.events.subscribe(self._note_budget, BudgetChanged)
        admission = Admission(self.budget, capacity, residency)
        self._queue = JobQueue(self._context, admission)
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.serve(self._context, self._queue)
        self._loop = EngineLoop(
            *(self._context, self.policy, admission, self._queue, undoes_packing, self._alarms)
        )
        self._loop.limits.spills = self._spills
        with TRACE_LOCK:  # a trace patches the same functions for a while
            rng.install()
        forks.install()
        garbage.install()
        self._loop.start()
        self._process = os.getpid()
        atexit.register(self._end_at_exit)

    def submit(self, job: Job) -> JobHandle:
        """Adds a job; it starts as soon as it fits beside those that run.

        Raises:
            JobError: its name is taken, its model is on another device, or the engine is closed; or
                it is no job.
        """
        if not isinstance(job, Job):
            raise JobError(f"submit takes a waterflow.Job, got {job!r}")
        with self._context.state:
            if self._queue.is_closed:
                raise JobError(f"job {job.name!r}: the engine is closed; make a new one")
            if job.name in self._queue.submitted:
                raise JobError(f"job {job.name!r}: the name is taken; names must be unique")
            _check_place(job, self._lanes.device)
            check_job_priority(job.name, job.priority, self.policy)
            seed = draw_seed() if job.seed is None else job.seed
            checkpoints = self._checkpoints
            resumed = None if checkpoints is None else checkpoints.resumed.get(job.name)
            number = len(self._queue.submitted)
            events, wake = self._context.events, self._context.wake
            self._alarms.expect(job.name, _place_of(job))
            run = JobRun(
                *(number, job, seed, self._lanes, self._captures, events, wake, self._audit),
                tiers=self._tiers_of(job),
                throttle=_C.Throttle(self._context.precedence, self._context.calls),
                keeps_place=checkpoints is not None and checkpoints.are_written,
                resumed=resumed,
                limit=self._loop.limits.of_new(job),
                spill_to=self._spill_to,
                callbacks=self._context.callbacks,
                side_by_side=self._costs.side_by_side,
            )
            if checkpoints is not None:
                checkpoints.enter(run)
            _C.set_job_name(self._arena, number, printable(job.name))
            self._queue.add(run)
        return JobHandle(self._queue, run, self.policy, self._loop.limits)

    def _tiers_of(self, job: Job) -> Tiers | None:
        """When the job's steps are captured; None: before they run first, where they can be.

        So are those of a job with a limit, as eager steps know none.
        On devices that queue, eager steps run alone and their memory is not known before: there all
        are captured first.
        """
        if job.capture != "auto" or not tiers_are_on() or "all" in (job.audit, self._audit):
            return None
        if self._lanes.device.queues or self._loop.limits.of_new(job) is not None:
            return None
        return Tiers(job, self._costs, self.budget)

    def expect(self, jobs: int) -> None:
        """Says that so many jobs are still to be submitted, each like one of those before: a
        capture that will serve them, too, is then made sooner. Numbers do not depend on it.

        Raises:
            JobError: that is no number of jobs.
        """
        if type(jobs) is not int or jobs < 0:
            raise JobError(f"expect takes a whole number of jobs, 0 or more, got {jobs!r}")
        self._costs.expect(jobs)

    def subscribe(self, subscriber: Subscriber, *kinds: Kind) -> None:
        """Calls `subscriber` with every event from now on: see `waterflow.engine.events`.

        On the thread where it happens, so it has to be quick. One that raises hears no more, and a
        warning says so.

        Args:
            subscriber: called with one event at a time.
            kinds: classes of the events to hear of; none: all of them. Steps that nobody hears of
                one by one are told of many at a time, which takes less of the lanes' time; with
                `TrainRan` among the kinds, so they are here.

        Raises:
            TypeError: a kind is no class of events.
        """
        for kind in kinds:
            if kind not in (*EVENTS, TrainRan):
                raise TypeError(
                    f"{kind!r} is no kind of event that can be subscribed to: give classes of "
                    "waterflow.engine.events, such as StepDone, or none for all events"
                )
        self._context.events.subscribe(muted_by_errors(subscriber), *kinds)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            self.stop_all()
        self.close()

    def resize(self, memory: int | str) -> None:
        """Changes the budget, while jobs run: at the next moment at which none is in a step.

        What is given up is the system's at once. Opportunistic jobs for which there is no room any
        more rest until there is, and jobs that take turns wait for theirs. Returns when it is done;
        in a job's callback at once.

        Args:
            memory: bytes that all jobs together may hold, or a text such as "512MiB".

        Raises:
            BudgetError: the other jobs do not fit; names what each holds. Nothing has changed.
            JobError: no budget, or more than the device has. Nothing has changed.
        """
        budget = parse_bytes(memory)
        self._queue.ask(lambda: self._loop.limits.resize(budget))

    def _note_budget(self, event: BudgetChanged) -> None:
        self.budget = event.budget
        self._largest_budget = max(self._largest_budget, event.budget)

    def hold(self) -> None:
        """Lets no job begin before `release` or `close`; first steps are prepared meanwhile."""
        self._queue.holds_admission = True

    def release(self) -> None:
        """Waits until the jobs submitted so far are prepared, the first 64 of them, and lets them
        begin.

        Raises:
            BudgetError: one of these does not fit even alone; nothing has run.
        """
        self._queue.release()

    def stop_all(self) -> None:
        """Ends every job after its present step."""
        for job in self._queue.everybody:
            self._queue.request_stop(job)

    def interrupt(self, insists: bool = False) -> None:
        """Ends every job after its present step; the report says that the run was interrupted.
        Where checkpoints are written, each job ends after one.

        Args:
            insists: whether `close` is to wait no longer, even where Ctrl-C has left a callback.
        """
        self._interrupted, self._insists = True, insists
        for job in self._queue.everybody:
            if self._checkpoints is None or not self._checkpoints.stop(job):
                self._queue.request_stop(job)

    @property
    def lanes(self) -> int:
        """Node groups that may run at once."""
        return self._lanes.lanes

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` has been called, or Ctrl-C pressed while the engine closed."""
        return self._interrupted

    @property
    def is_in_callback(self) -> bool:
        """Whether the calling thread is in a callback of a job's."""
        return self._context.callbacks.job_here is not None

    def close(self, timeout: float | None = None) -> None:
        """Waits for all jobs, ends the threads, and raises what broke the engine, if it broke.

        Ctrl-C asks the jobs to end after their present steps. A second one waits no longer: steps
        and callbacks that are under way end by themselves, and the threads after them.

        Args:
            timeout: seconds after which what still runs is left to itself; None: never.

        Raises:
            KeyboardInterrupt: the second one.
            TimeoutError: it has not ended within `timeout` seconds.
            JobError: it is closed in a callback of one of its jobs, which would wait for itself.
        """
        self._context.callbacks.check_may_wait("the engine to end")
        self._queue.close()
        until = None if timeout is None else time.monotonic() + timeout
        # Thread.join forgets a running thread when Ctrl-C interrupts it (CPython before 3.13).
        ended, patience = False, _PATIENCE_SECONDS
        while not ended:
            try:
                with unless_a_worker_dies():
                    ended = self._queue.join(0.2)
            except KeyboardInterrupt as error:
                left = isinstance(error, CallbackLeftError) and not self._insists
                if self._interrupted and not left:
                    raise
                self.interrupt()
            patience -= 0.2 * self._interrupted
            if not ended and patience < 0 < patience + 0.2:
                print(_WAITING, file=sys.stderr, flush=True)
            if until is not None and not ended and time.monotonic() > until:
                raise TimeoutError(f"the engine has not ended within {timeout} seconds")
        atexit.unregister(self._end_at_exit)
        self._loop.join()
        for submitted in self._queue.submitted.values():
            if submitted.report.exception is not None:  # kept by whoever keeps the report
                let_go_of_callers(submitted.report.exception)
        if self._queue.broken is not None:
            if isinstance(self._queue.broken, DeviceLostError):
                self._queue.broken.report = self.report()
            raise self._queue.broken

    def _end_at_exit(self) -> None:
        """The process ends, and nobody has closed the engine: threads that go on while the
        interpreter is taken apart would abort it."""
        if os.getpid() != self._process:  # a fork has none of the threads
            return
        left = [job for job in self._queue.everybody if not job.ended]
        if left:
            names = ", ".join(repr(job.name) for job in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            print(
                f"waterflow: the process ends while an engine is at work: {names}{more} "
                "stopped before the end. Use `with wf.Engine(...) as engine:`, or call "
                "engine.close(), which waits for the jobs",
                file=sys.stderr,
            )
        self.stop_all()
        with contextlib.suppress(BaseException):  # it was the jobs' to raise, while there was time
            self.close(_LAST_SECONDS)

    def events(self) -> EventIterator:
        """What happens in the engine from now on, until it has ended: see
        `waterflow.engine.events`. For ``async for``; each iterator hears everything, and of an
        engine that has ended its end.
        """
        return EventIterator(self._context.events)

    def report(self) -> Report:
        """The run so far."""
        statistics = self._arena.statistics()
        jobs = dict(self._queue.submitted)
        names = list(jobs)
        for job in jobs.values():
            job.report.peak_bytes = int(self._arena.peak(job.number))
        rounds, flow = self._loop.round_planner, self._loop.flow_planner
        return Report(
            jobs={name: job.report for name, job in jobs.items()},
            peak_bytes=int(statistics.peak),
            extent_bytes=int(statistics.extent),
            budget_bytes=self._largest_budget,
            policy=self.policy.name,
            device=self.device,
            lanes=self._lanes.lanes,
            seconds=self._recorder.seconds,
            interrupted=self._interrupted,
            timeline=self._recorder.timeline(self._arena, names),
            spans=self._recorder.spans(names),
            versions=versions(),
            schedules=list(rounds.texts),
            syncs=int(statistics.forced_syncs + statistics.explicit_syncs) + flow.waits,
            deviations=rounds.deviations + flow.deviations,
            workspace_bytes=self._lanes.device.workspace_bytes,
            pinned_bytes=self._lanes.device.pinned_bytes,
            idle_seconds=self._loop.idle_seconds,
            decisions=self._recorder.decisions,
        )

    def check_races(self) -> list[Any]:
        """Violations of happens-before in all that has been recorded (``check=True``)."""
        if not self._check:
            raise JobError("the engine was made without check=True, it has no record of its memory")
        return list(_C.check_happens_before(self._arena.take_log(), self._lanes.lanes))


def _policy(policy: str | Policy, quantum: float | str | None) -> Policy:
    """The policy, with this quantum; raises JobError where it takes none."""
    if quantum is None:
        return get_policy(policy) if isinstance(policy, str) else policy
    if policy != TimeSlice.name:
        raise JobError(f"quantum={quantum!r} is for policy='time-slice', got policy={policy!r}")
    return TimeSlice(quantum)


def _number_of_lanes(lanes: int | str) -> int:
    """How many lanes there are; raises JobError where they are no number of lanes."""
    if lanes == "auto":
        return 2
    if type(lanes) is not int or not 1 <= lanes <= 64:
        raise JobError(f"lanes must be a whole number from 1 to 64, or 'auto', got {lanes!r}")
    return lanes


def _threads(threads: int | None, lanes: int, default: int) -> int:
    """Intra-op threads of each lane; raises JobError where they are no number of threads."""
    if threads is None:
        return max(1, default // lanes)
    if type(threads) is not int or threads < 1:
        raise JobError(f"threads must be a positive whole number, got {threads!r}")
    return threads


def _place_of(job: Job) -> Place:
    """What warnings of the job point at, where no line is known to be at fault."""
    return place_of_function(job.function) or place_of_call()


def _warn_of_too_much(device: Device, budget: int) -> None:
    """Warns where the budget is more than there is at all: jobs that fill it would be killed."""
    limit = device.memory_limit
    if limit is not None and budget > limit.size:
        text = (
            f"memory={budget} bytes ({format_bytes(budget)}) is more than {limit.source}, "
            f"{format_bytes(limit.size)}: jobs that need so much are killed by the system. Give "
            f"memory less than that, and leave some for data and Python"
        )
        warn_at(place_of_call(), text, BudgetWarning)


def _check_place(job: Job, device: Device) -> None:
    """Raises JobError where a tensor of the model is on another device than the engine."""
    for name, tensor in [*job.root.named_parameters(), *job.root.named_buffers()]:
        if tensor.device != device.tensors:
            raise JobError(
                f"job {job.name!r}: {name} is on {tensor.device}, the job is to run on "
                f"{device.tensors}: call model.to({str(device.tensors)!r}) and make the optimizer "
                "from the moved model's parameters"
            )
