"""`run`: co-trains a fixed list of jobs to their ends."""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from types import FrameType
from typing import Any

from waterflow.common.errors import JobError, RunInterrupted
from waterflow.engine.checkpoints import Checkpoints
from waterflow.engine.engine import Engine
from waterflow.executor.device.base import Device
from waterflow.job.job import Job
from waterflow.partitioner import Policy
from waterflow.report.report import Report


def run(
    jobs: Sequence[Job],
    memory: int | str,
    *,
    device: str | Device = "cpu",
    policy: str | Policy = "flow",
    lanes: int | str = "auto",
    threads: int | None = None,
    progress: bool = False,
    audit: str = "log",
    quantum: float | str | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: float | str | None = None,
    resume: str | PathLike[str] | None = None,
    resume_partly: bool = False,
    spill: bool | str = False,
    callbacks: str = "lane",
) -> Report:
    """Co-trains jobs under one memory budget until all have ended.

    Every job trains exactly as it would alone. One that fails ends alone, with a warning and its
    error in the report; `Report.raise_errors` raises it. Ctrl-C ends all after the present step,
    and a checkpoint of it where some are written, and then the run with RunInterrupted; a second
    one waits for nothing, and leaves a callback that sleeps to itself.

    A checkpoint holds all that a job needs to go on in another process with the same bits, where
    the same script builds the same jobs: docs/checkpoints.md tells what, and what not.

    Args:
        jobs: the jobs, with unique names.
        memory: bytes that all jobs together may hold, or a text such as "512MiB".
        device: "cpu", "cuda" (torch's current device) or "cuda:1". The models must be there.
        policy: "flow", "time-slice", "waterwave", "waterwave-s", "temporal", or a policy of one's
            own.
        lanes: node groups that may run at once; "auto": two, and one after another wherever jobs
            have been seen to do more so.
        threads: intra-op threads of each lane; torch's count divided by the lanes if None.
        progress: show progress on stderr.
        audit: how often captured steps are compared with eager ones, by bits: "log" (at steps 1, 2,
            4, 8, ...), "all" or "off"; a job's own `audit` goes before it.
        quantum: of the policy "time-slice", under which more jobs than fit take turns in memory:
            seconds of a turn, or a text such as "60s".
        checkpoint: a folder for a checkpoint of each job, the latest one. None: nothing is written.
        checkpoint_every: how often: seconds, or a text such as "5min" (the default) or "100 steps".
            Whatever it is, a job that has ended is written, too.
        resume: a folder of checkpoints from which these jobs go on. Where it is also `checkpoint`
            and nothing is there yet, they begin.
        resume_partly: jobs that are not in `resume` begin, and those that are only there stay
            there; else both are errors.
        spill: whether a job that does not fit even alone is planned into the memory there is, by
            having values that are not needed for long copied to a slower tier and back: True or
            "memory" for ordinary memory, "disk" for a mapped file in the folder of temporary files.
        callbacks: whose thread runs `on_step` and `evaluate`: "lane", one of the engine's, or
            "caller", the one that calls this. There Ctrl-C leaves a callback at once.

    Raises:
        JobError: an argument cannot be used.
        CheckpointError: a checkpoint is of other jobs, damaged, missing, or of another version;
            raised before anything runs.
        BudgetError: a job cannot fit even alone; raised before anything runs. Of the first 64 jobs:
            a later one fails by itself, when its turn has come.
        DeviceLostError: a kernel has broken the GPU's context; its ``report`` is the run so far.
        RunInterrupted: Ctrl-C was pressed: a KeyboardInterrupt whose ``report`` is the run so far.

    Warns:
        JobFailedWarning: a job has failed.
        NonFiniteLossWarning: a job's loss has become NaN or infinite.
        BudgetWarning: `memory` is more than there is.
        OpaqueStepWarning: a job's steps cannot be captured.
    """
    jobs = _listed(jobs)
    _check_jobs(jobs)
    checkpoints = None
    if not checkpoint == checkpoint_every == resume is None:
        checkpoints = Checkpoints(jobs, checkpoint, checkpoint_every, resume, resume_partly)
    with contextlib.nullcontext() if checkpoints is None else checkpoints.written():
        engine = Engine(
            memory,
            device=device,
            policy=policy,
            lanes=lanes,
            threads=threads,
            progress=progress,
            audit=audit,
            quantum=quantum,
            spill=spill,
            checkpoints=checkpoints,
            callbacks=callbacks,
        )
        _train(engine, jobs)
    report = engine.report()
    if report.interrupted:
        stopped = RunInterrupted("the run was interrupted; this exception's report tells of it")
        stopped.report = report
        raise stopped
    return report


def _train(engine: Engine, jobs: Sequence[Job]) -> None:
    engine.hold()
    try:
        with _stopped_by_interrupt(engine), engine:
            for job in jobs:
                if not engine.interrupted:
                    engine.submit(job)
            engine.release()
    except KeyboardInterrupt:  # of a handler of the user's own, or the second one
        engine.interrupt()
        with contextlib.suppress(TimeoutError):
            engine.close(_LEAVE_AFTER_SECONDS)


#: After a second Ctrl-C nobody is waited for longer than this.
_LEAVE_AFTER_SECONDS = 2.0


@contextlib.contextmanager
def _stopped_by_interrupt(engine: Engine) -> Iterator[None]:
    """Ctrl-C asks the jobs to stop; a second one raises KeyboardInterrupt.

    The first raises nothing: an exception between two bytecodes of a `with` statement can leave a
    lock taken for good. But it leaves a callback that this thread is in. Signals reach the main
    thread only, and a user's own handler stays.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        again = engine.interrupted
        engine.interrupt(insists=again)
        if again or engine.is_in_callback:
            signal.default_int_handler(signum, frame)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _listed(jobs: Any) -> list[Job]:
    if isinstance(jobs, Job) or not isinstance(jobs, Iterable):
        raise JobError(f"run takes a list of jobs, got {_named(jobs)}: write run([job], ...)")
    return list(jobs)


def _named(what: Any) -> str:
    return f"the job {what.name!r}" if isinstance(what, Job) else repr(what)


def _check_jobs(jobs: Sequence[Job]) -> None:
    if not jobs:
        raise JobError("run needs at least one job, got none")
    for job in jobs:
        if not isinstance(job, Job):
            raise JobError(f"run takes waterflow.Job objects, got {job!r}")
    counts = collections.Counter(job.name for job in jobs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise JobError(
            f"job {twice[0]!r}: the name is used {counts[twice[0]]} times; names must differ"
        )
