"""`run`: co-trains a fixed list of jobs to their ends."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from waterflow.engine import Engine
from waterflow.executor.device import Device
from waterflow.job import Job
from waterflow.partitioner import Policy
from waterflow.partitioner.errors import JobError
from waterflow.report import Report


def run(
    jobs: Sequence[Job],
    memory: int | str,
    *,
    device: str | Device = "cpu",
    policy: str | Policy = "waterwave",
    lanes: int = 2,
    threads: int | None = None,
    progress: bool = False,
) -> Report:
    """Co-trains jobs under one memory budget until all have ended.

    Every job trains exactly as it would alone. One that fails ends alone, with its error in the
    report. Ctrl-C ends all after the present step; the report says so.

    Args:
        jobs: the jobs, with unique names.
        memory: bytes that all jobs together may hold, or a text such as "512MiB".
        device: "cpu", "cuda" (torch's current device) or "cuda:1". The models must be there.
        policy: "waterwave", "waterwave-s", "temporal", or a policy of one's own.
        lanes: node groups that may run at once.
        threads: intra-op threads of each lane; torch's count divided by the lanes if None.
        progress: show progress on stderr.

    Raises:
        JobError: an argument cannot be used.
        BudgetError: a job cannot fit even alone; raised before anything runs.
        DeviceLostError: a kernel has broken the GPU's context; its ``report`` is the run so far.
    """
    jobs = list(jobs)
    _check_jobs(jobs)
    engine = Engine(
        memory, device=device, policy=policy, lanes=lanes, threads=threads, progress=progress
    )
    engine._hold_admission = True
    try:
        with engine:
            for job in jobs:
                engine.submit(job)
            engine._release_when_prepared()
    except KeyboardInterrupt:  # also one that came while the engine was being closed
        engine._interrupted = True
        engine.stop_all()
        engine.close()
    return engine.report()


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
