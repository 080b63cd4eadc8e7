"""What a planner must know of a job at one batch size, found by capture alone: no kernel runs.

A `forecast` is of a job that does not even exist: nothing is allocated for its parameters, so a
model far larger than the memory at hand can be looked at. The one exception: a factory that needs
real tensors (it reads numbers out of them) is called again, and builds its job in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from waterflow.capture.fake_job import (
    BuiltJob,
    build,
    build_real,
    first_batch,
    flat_batch,
    name_of,
    random_kept,
)
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common.errors import CaptureError, JobError, RunOnlyError
from waterflow.executor.device.storages import rounded, span_of, unique_storages
from waterflow.executor.profile.fake import StepWalk, walk_step
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.partitioner.profile import IntArray, Profile
from waterflow.study.graphs import StudyGraphs, capture_steps

#: A job whose parameters are no larger is built in memory where its capture fails without.
_SMALL_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Footprint:
    """What a job needs at one batch size, rounded as an arena rounds.

    Attributes:
        name: the job's name.
        first: what the step does to memory that creates the optimizer's state, which survives it;
            None where no step does, or an eager one.
        steady: what every later step does. Times of both are unknown (zeros), and their own
            ``persistent_bytes`` are 0, as those of measured profiles are.
        persistent_bytes: parameters, buffers, constants and optimizer state, held all the time once
            the first step is done; on a GPU the device input for batches, too.
        boundary: node of the steady step where its backward pass begins, None without one.
        flops: int64, arithmetic operations of each node of the steady step.
        moved_bytes: int64, bytes that each node of the steady step reads and writes.
        source: where the numbers come from; ``"fake"``.
    """

    name: str
    first: Profile | None
    steady: Profile
    persistent_bytes: int
    boundary: int | None
    flops: IntArray
    moved_bytes: IntArray
    source: str = "fake"


def footprint_of(
    job: Job, *, batch: Any = None, alignment: int = 64, traces: OptimizerTraces | None = None
) -> Footprint:
    """The footprint of a job that is there already: captured, not run; nothing of it changes.

    Args:
        job: the job.
        batch: a batch as its data yields it; None takes the first of `job.data`.
        alignment: bytes that the arena rounds up to: 64 on the host, 512 on a GPU.
        traces: shared by jobs that are captured together.

    Raises:
        CaptureError: its step cannot be captured exactly.
        RunOnlyError: its memory is known only by running it.
        JobError: its data can be read only once, or has no batch.
    """
    with TRACE_LOCK, random_kept():
        if batch is None and iter(job.data) is job.data:
            raise JobError(
                f"job {job.name!r}: its data can be read only once, and its first batch belongs to "
                "the training; pass a batch like it: footprint_of(job, batch=...)"
            )
        flat = first_batch(job) if batch is None else flat_batch(job, batch)
        return capture_footprint(job, flat, traces).at(alignment, job.name)


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


@dataclass(frozen=True, eq=False)
class RawFootprint:
    """A footprint in bytes that are not yet rounded.

    Attributes:
        first, steady: the walks through the steps.
        persistent: int64, bytes of each persistent storage.
    """

    first: StepWalk | None
    steady: StepWalk
    persistent: IntArray

    def at(self, alignment: int, name: str) -> Footprint:
        """The footprint for an arena of this alignment."""
        return Footprint(
            name=name,
            first=None if self.first is None else self.first.profile(alignment, name),
            steady=self.steady.profile(alignment, name),
            persistent_bytes=sum(rounded(int(size), alignment) for size in self.persistent),
            boundary=self.steady.boundary,
            flops=self.steady.flops,
            moved_bytes=self.steady.moved_bytes,
        )


def capture_footprint(
    job: Job, batch: FlatBatch, traces: OptimizerTraces | None = None
) -> RawFootprint:
    """Captures a job's steps on a batch of this layout and follows them; nothing of it changes.

    Args as for `capture_steps`.

    Raises:
        CaptureError, RunOnlyError: as `capture_steps` does.
        JobError: it is on a device that is not there.
    """
    if job.device.type == "cuda" and not torch.cuda.is_available():
        raise JobError(  # autograd would crash: it has no threads for such a device
            f"job {job.name!r}: its model is on {job.device}, and torch finds no GPU here. "
            "Make the model on the host: nearly all of its steps' storages are the same"
        )
    graphs = capture_steps(job, batch, traces)
    return RawFootprint(
        first=None if graphs.first is None else walk_step(graphs.first),
        steady=walk_step(graphs.steady),
        persistent=_persistent_sizes(job, batch, graphs),
    )


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
    return sum(p.numel() * p.element_size() for p in job.root.parameters())


def _persistent_sizes(job: Job, batch: FlatBatch, graphs: StudyGraphs) -> IntArray:
    """Bytes of each storage that the job holds between steps once its state is there."""
    here = {job.device, torch.device("meta")}
    unique = unique_storages(graphs.persistent()).values()
    sizes = [t.untyped_storage().nbytes() for t in unique if t.device in here]
    if job.device.type != "cpu":  # its batches come by way of a device input
        sizes += [span_of(t).numel() * t.element_size() for t in batch.tensors]
    return np.array(sizes, dtype=np.int64)
