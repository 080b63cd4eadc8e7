"""A job's memory before it runs: footprints from the capture of jobs that are never trained.

Nothing is allocated for parameters and no kernel runs, so a model far larger than the memory at
hand can be looked at. The one exception: a factory that needs real tensors (it reads numbers out of
them) is called again, and builds its job in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from waterflow.capture.fake_job import BuiltJob, build, build_real, name_of
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common.errors import CaptureError, JobError
from waterflow.job.job import Job
from waterflow.study.footprint import (
    Footprint,
    RawFootprint,
    RunOnlyError,
    capture_footprint,
    footprint_of,
    job_of,
)

__all__ = [
    "Footprint",
    "RunOnlyError",
    "capture_built",
    "footprint_of",
    "forecast",
    "job_of",
]

#: A job whose parameters are no larger is built in memory where its capture fails without.
_SMALL_BYTES = 1 << 30


def forecast(make_job: Callable[[], Job], *, alignment: int = 64) -> Footprint:
    """The footprint of the job that a factory makes, which is not run.

    The factory must make all that it needs, the model and the optimizer above all: it is called
    where constructors of tensors allocate nothing. Random streams are afterwards where they were.

    Args:
        make_job: makes the job; called once, and again only if it needs real tensors.
        alignment: bytes that the arena rounds up to: 64 on the host, 512 on a GPU.

    Raises:
        JobError: the factory raises.
        RunOnlyError: the job's memory is known only by running it.
        CaptureError: the job's step cannot be captured exactly.
    """
    what = name_of(make_job)
    with TRACE_LOCK:
        built = build(make_job, what)
        return capture_built(built, make_job, what).at(alignment, built.job.name)


def capture_built(
    built: BuiltJob,
    make: Callable[[], Job],
    what: str,
    traces: OptimizerTraces | None = None,
) -> RawFootprint:
    """Captures a job that was built to be looked at; builds it in memory where only that helps.

    Args:
        built: the job.
        make: the factory that made it.
        what: what to call the factory in errors.
        traces: see `capture_footprint`.

    Raises:
        CaptureError, JobError: see `capture_footprint`.
    """
    try:
        return capture_footprint(built.job, built.batch, traces)
    except (CaptureError, RunOnlyError) as error:
        # Python code may keep tensors where the capture cannot tell fake ones from its own.
        if built.real or not built.job.capture or _parameter_bytes(built.job) > _SMALL_BYTES:
            raise
        try:
            real = build_real(make, what)
        except JobError:
            raise error from None
    return capture_footprint(real.job, real.batch)


def _parameter_bytes(job: Job) -> int:
    return sum(p.numel() * p.element_size() for p in job.model.parameters())
