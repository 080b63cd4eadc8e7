"""The engine: takes jobs, admits them while they fit, runs rounds of steps, reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common.errors import BudgetError, DeviceLostError, JobError
from waterflow.common.units import parse_bytes
from waterflow.engine.admission import Admission
from waterflow.engine.flow import FlowExecutor
from waterflow.engine.job_run import JobRun
from waterflow.engine.recorder import Recorder, versions
from waterflow.engine.round_planner import RoundPlanner
from waterflow.engine.rounds import RoundExecutor
from waterflow.executor.data.feeder import FeedItem
from waterflow.executor.device.device import Device, get_device
from waterflow.executor.run import rng
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.job.job import Job, check_audit
from waterflow.job.training_step import draw_seed
from waterflow.partitioner import Policy, get_policy
from waterflow.report.job_report import JobReport
from waterflow.report.progress import NullProgress, Progress, ProgressDisplay
from waterflow.report.report import Report
from waterflow.steps.prepared import PreparedBatch

#: A round waits this share of the last round for jobs whose next batch is about to be ready.
_GRACE = 0.25
_LEAST_GRACE_SECONDS = 0.002


class JobHandle:
    """A submitted job, seen from outside."""

    def __init__(self, engine: Engine, member: JobRun) -> None:
        self._engine = engine
        self._member = member

    @property
    def name(self) -> str:
        """The job's name."""
        return self._member.name

    @property
    def status(self) -> str:
        """ "queued", "running", "finished", "stopped", "failed" or "out_of_memory"."""
        return self._member.report.state

    @property
    def losses(self) -> list[float]:
        """The losses so far, one per step."""
        return list(self._member.report.losses)

    def stop(self) -> None:
        """Ends the job after its present step."""
        self._engine._request_stop(self._member)

    def result(self, timeout: float | None = None) -> JobReport:
        """Waits for the job's end and returns its report.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
        """
        if not self._engine._wait_for(self._member, timeout):
            raise TimeoutError(f"job {self.name!r} has not ended within {timeout} seconds")
        return self._member.report


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
        lanes: int = 2,
        threads: int | None = None,
        progress: bool = False,
        check: bool = False,
        audit: str = "log",
    ) -> None:
        """Takes the budget.

        Args:
            memory: bytes that all jobs together may hold, or a text such as "512MiB".
            device: "cpu", "cuda" (torch's current device) or "cuda:1".
            policy: "flow", "waterwave", "waterwave-s", "temporal", or a policy of one's own.
            lanes: node groups that may run at once.
            threads: intra-op threads of each lane; torch's count divided by the lanes, at least 1,
                if None.
            progress: show progress on stderr.
            check: record every memory event for `check_races` (costs memory, for tests).
            audit: how often captured steps are compared with eager ones, where a job does not say
                it: "log", "all" or "off", see `Job`.

        Raises:
            JobError: an argument cannot be used; names it and the remedy.
        """
        self.budget = parse_bytes(memory)
        check_audit(audit)
        self._audit = audit
        where = get_device(device)
        if type(lanes) is not int or not 1 <= lanes <= 64:
            raise JobError(f"lanes must be a whole number from 1 to 64, got {lanes!r}")
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        self.device = where.name
        default = torch.get_num_threads()
        threads = threads if threads is not None else max(1, default // lanes)
        if type(threads) is not int or threads < 1:
            raise JobError(f"threads must be a positive whole number, got {threads!r}")
        self._lanes = Lanes(where, self.budget, lanes, threads, default)
        self._arena = self._lanes.arena
        self._residency = Residency(self._arena, where)
        capacity = int(self._arena.statistics().capacity)
        self._admission = Admission(self.budget, capacity, self._residency)
        self._members: list[JobRun] = []
        self._traces = OptimizerTraces()
        self._state = threading.Condition()
        self._hold_admission = False
        self._closing = False
        self._over = threading.Event()
        self._interrupted = False
        self._broken: BaseException | None = None
        self._planner = RoundPlanner(self.policy, self._lanes, self._residency)
        self._recorder = Recorder()
        self._rounds = RoundExecutor(
            self._lanes,
            self._residency,
            self._planner,
            self._recorder,
            check=check,
            guard=self._guard,
            show=self._show,
        )
        self._flowing = FlowExecutor(
            self._lanes,
            self._residency,
            self._recorder,
            self._state,
            check=check,
            guard=self._guard,
            show=self._show,
            check_device=self._rounds.check_device,
        )
        self._check = check
        self._arena.record(check)
        self._progress: ProgressDisplay = Progress() if progress else NullProgress()
        self._progress.start([])
        with TRACE_LOCK:  # a trace patches the same functions for a while
            rng.install()
        self._thread = threading.Thread(target=self._run, name="waterflow-lane-0", daemon=True)
        self._thread.start()

    # For users

    def submit(self, job: Job) -> JobHandle:
        """Adds a job; it starts as soon as it fits beside those that run.

        Raises:
            JobError: its name is taken, its model is on another device, or the engine is closed.
        """
        with self._state:
            if self._closing or self._broken is not None:
                raise JobError(f"job {job.name!r}: the engine is closed; make a new one")
            if any(member.name == job.name for member in self._members):
                raise JobError(f"job {job.name!r}: the name is taken; names must be unique")
            _check_place(job, self._lanes.device)
            seed = draw_seed() if job.seed is None else job.seed
            number = len(self._members)
            member = JobRun(number, job, seed, self._lanes, self._traces, self._wake, self._audit)
            _C.set_job_name(self._arena, member.number, member.name)
            self._members.append(member)
            self._progress.join(member.name, job.total_steps)
            self._state.notify_all()
        return JobHandle(self, member)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            self.stop_all()
        self.close()

    def stop_all(self) -> None:
        """Ends every job after its present step."""
        for member in list(self._members):
            self._request_stop(member)

    def close(self) -> None:
        """Waits for all jobs, ends the threads, and raises what broke the engine, if it broke."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._join()
        if self._broken is not None:
            raise self._broken

    def _join(self) -> None:
        # Thread.join forgets a running thread when Ctrl-C interrupts it (CPython before 3.13).
        while not self._over.is_set():
            try:
                self._over.wait(0.2)
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self.stop_all()

    def report(self) -> Report:
        """The run so far."""
        statistics = self._arena.statistics()
        names = [member.name for member in self._members]
        for member in self._members:
            member.report.peak_bytes = int(self._arena.peak(member.number))
        return Report(
            jobs={member.name: member.report for member in self._members},
            peak_bytes=int(statistics.peak),
            extent_bytes=int(statistics.extent),
            budget_bytes=self.budget,
            policy=self.policy.name,
            device=self.device,
            lanes=self._lanes.lanes,
            seconds=self._recorder.seconds,
            interrupted=self._interrupted,
            timeline=self._recorder.timeline(self._arena, names),
            spans=self._recorder.spans(names),
            versions=versions(),
            schedules=list(self._planner.texts),
            syncs=int(statistics.forced_syncs + statistics.explicit_syncs) + self._flowing.waits,
            deviations=self._planner.deviations + self._flowing.deviations,
            workspace_bytes=self._lanes.device.workspace_bytes,
        )

    def check_races(self) -> list[Any]:
        """Violations of happens-before in all that has been recorded (``check=True``)."""
        if not self._check:
            raise JobError("the engine was made without check=True, it has no record of its memory")
        return list(_C.check_happens_before(self._arena.take_log(), self._lanes.lanes))

    # For handles and run()

    def _release_when_prepared(self) -> None:
        """Lets jobs in once all are captured and profiled and each is known to fit alone."""
        with self._state:
            self._state.wait_for(lambda: all(self._is_prepared(m) for m in self._members))
        prepared = [member for member in self._members if not member.ended]
        if not all(map(self._admission.fits_alone, prepared)):
            raise BudgetError(self._admission.too_small(prepared))
        with self._state:
            self._hold_admission = False
            self._state.notify_all()

    def _is_prepared(self, member: JobRun) -> bool:
        return member.ended or self._broken is not None or member.next_turn() is not None

    def _request_stop(self, member: JobRun) -> None:
        with self._state:
            member.stop_requested = True
            self._state.notify_all()

    def _wait_for(self, member: JobRun, timeout: float | None) -> bool:
        with self._state:
            return self._state.wait_for(
                lambda: (member.ended and not member.admitted) or self._over.is_set(), timeout
            )

    def _wake(self) -> None:
        with self._state:
            self._state.notify_all()

    # The engine's thread: lane 0

    def _run(self) -> None:
        self._lanes.adopt_lane(0)
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            self._break(error)
        finally:
            try:
                self._wind_up()
            finally:
                rng.uninstall()
                self._over.set()
                self._wake()

    def _break(self, error: BaseException) -> None:
        """The engine ends with an error that is no single job's."""
        try:
            self._rounds.check_device()
        except DeviceLostError as lost:
            lost.__cause__ = error if error is not lost else None
            error = lost
        self._broken = error
        for member in self._members:
            member.fail(error)
        if isinstance(error, DeviceLostError):
            error.report = self.report()

    def _wind_up(self) -> None:
        for member in self._members:
            if member.admitted and not isinstance(self._broken, DeviceLostError):
                self._dismiss(member)
        self._recorder.stop()
        self._lanes.close()
        self._progress.stop()
        for member in self._members:
            member.feeder.join(1.0)

    def _wait_for_work(self) -> bool:
        with self._state:
            self._state.wait_for(lambda: self._has_work() or self._is_over())
            return not self._is_over()

    def _is_over(self) -> bool:
        return self._closing and all(m.ended and not m.admitted for m in self._members)

    def _has_work(self) -> bool:
        return self._rounds.pending or any(
            self._needs_attention(member) for member in self._members
        )

    def _needs_attention(self, member: JobRun) -> bool:
        if member.ended:
            return member.admitted
        if member.stop_requested or not member.feeder.started:
            return True
        if member.next_turn() is None:
            return False
        return member.admitted or not (self._hold_admission or member.waiting)

    def _turn(self) -> None:
        """One round: whoever comes and goes does so here, between steps."""
        self._start_feeders()
        self._end_stopped()
        self._flowing.close_rooms(self._members)
        self._admit()
        if self.policy.flows:
            self._flow()
        else:
            self._run_round(self._members)
        self._dismiss_ended()

    def _start_feeders(self) -> None:
        for member in self._members:
            if not member.feeder.started and not member.ended:
                member.feeder.start()

    def _end_stopped(self) -> None:
        for member in self._members:
            if member.stop_requested and not member.ended:
                self._rounds.conclude()
                member.end("stopped")

    def _admit(self) -> None:
        """Admits waiting jobs in the order of their submission, as long as they fit."""
        if self._hold_admission:
            return
        for member in self._members:
            fed = member.next_turn()
            if member.admitted or member.ended or fed is None:
                continue
            if fed.error is not None or fed.end:
                self._end_of_data(member, fed)
                continue
            try:
                self._admission.check(member, self._admitted())
            except (BudgetError, JobError) as error:
                member.fail(error)
                self._show(member)
                continue
            if not self._admission.fits_beside(member, self._admitted()):
                member.waiting = True
                return
            self._let_in(member)

    def _admitted(self) -> list[JobRun]:
        return [member for member in self._members if member.admitted]

    def _let_in(self, member: JobRun) -> None:
        member.waiting = False
        member.note_solo_peak()
        member.admitted = True
        member.start_clock()
        self._recorder.start()
        self._planner.moved()
        try:
            self._lanes.commit()
            member.move_in(self._residency)
            member.make_room(None, self._lanes, self._residency)
        except (RuntimeError, JobError) as error:
            member.fail(error)
            self._rounds.check_device()
        self._lanes.device.release_unused()
        self._show(member)

    def _dismiss_ended(self) -> None:
        for member in self._members:
            if member.ended and member.admitted:
                self._dismiss(member)

    def _dismiss(self, member: JobRun) -> None:
        member.move_out(self._residency)
        member.admitted = False
        self._planner.moved()
        for other in self._members:
            other.waiting = False
        self._show(member)
        self._wake()

    def _end_of_data(self, member: JobRun, fed: FeedItem[PreparedBatch]) -> None:
        self._rounds.conclude()
        if fed.error is not None:
            member.fail(fed.error)
        else:
            self._guard(member, lambda: member.enter_epoch(member.epoch + 1))
            member.end("finished")
        self._show(member)

    # FlowExecutor

    def _flow(self) -> None:
        """Whoever needs more than a lane takes a turn in a round; then the others flow."""
        flows = self._flowing.can_flow
        self._flowing.open_rooms(self._admitted())
        apart = [m for m in self._members if self._may_step(m) and not flows(m)]
        if apart:
            self._flowing.close_rooms(self._members)
            self._run_round(apart)
            self._dismiss_ended()  # others may need its place
            self._flowing.open_rooms(self._admitted())
        members = [m for m in self._members if flows(m)]
        if not any(map(self._may_step, members)):
            return
        self._rounds.conclude()
        flowed = self._flowing.run(members, lambda: self._is_interrupted(members))
        self._dismiss_ended()
        self._planner.moved()  # it may have packed the arena
        if flowed:
            left = self._flowing.take_left()
            if left:
                self._flowing.close_rooms(self._members)
                self._rounds.run(left)
        else:
            self._flowing.close_rooms(self._members)
            self._run_round(members)

    def _is_interrupted(self, flowing: Sequence[JobRun]) -> bool:
        """Whether somebody wants something that cannot be done while jobs flow."""
        return any(
            member.stop_requested if member in flowing else self._needs_attention(member)
            for member in self._members
        )

    # RoundExecutor

    def _run_round(self, members: Sequence[JobRun]) -> None:
        turns = self._collect_turns(members)
        if turns:
            self._rounds.run(turns)
        else:
            self._rounds.conclude()

    def _collect_turns(self, members: Sequence[JobRun]) -> list[tuple[JobRun, PreparedBatch]]:
        """Their next batches. Jobs that are nearly ready are waited for, a little."""
        patience = max(_LEAST_GRACE_SECONDS, _GRACE * self._rounds.seconds)
        with self._state:
            if any(map(self._may_step, members)):
                self._state.wait_for(lambda: self._all_ready(members), patience)
        turns: list[tuple[JobRun, PreparedBatch]] = []
        for member in members:
            if not self._may_step(member):
                continue
            fed = member.feeder.take()
            if fed.item is None:
                self._end_of_data(member, fed)
            elif self._guard(member, lambda m=member, f=fed: m.enter_epoch(f.epoch)):  # type: ignore[misc]
                turns.append((member, fed.item))
        return turns

    def _may_step(self, member: JobRun) -> bool:
        return member.admitted and not member.ended and member.next_turn() is not None

    def _all_ready(self, members: Sequence[JobRun]) -> bool:
        return all(m.next_turn() is not None for m in members if m.admitted and not m.ended)

    def _guard(self, member: JobRun, action: Callable[[], Any]) -> bool:
        """Runs something of the user's; an error ends this job alone."""
        try:
            action()
        except BaseException as error:  # a callback may raise SystemExit, too
            member.fail(error)
            self._show(member)
            return False
        return True

    def _show(self, member: JobRun) -> None:
        report = member.report
        loss = report.losses[-1] if report.losses else None
        self._progress.update(member.name, report.steps, loss, report.state)
        if member.ended:
            self._wake()


def _check_place(job: Job, device: Device) -> None:
    """Raises JobError where a tensor of the model is on another device than the engine."""
    for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]:
        if tensor.device != device.tensors:
            raise JobError(
                f"job {job.name!r}: {name} is on {tensor.device}, the job is to run on "
                f"{device.tensors}: call model.to({str(device.tensors)!r}) and make the optimizer "
                "from the moved model's parameters"
            )
