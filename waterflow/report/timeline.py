"""What a run recorded over time: the bytes each job held, and the node groups each lane ran.

Both are columns of numpy arrays, not lists of records, because a run of minutes makes millions of
samples. Neither knows about jobs beyond their names, so that pictures and traces need no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from waterflow.common.errors import ReportError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]
BytesArray = NDArray[np.int64]


class Timeline:
    """Memory over time: from `seconds[i]` on, the job `names[job[i]]` holds `bytes[i]` bytes.

    `seconds` counts from the start of the run. A sample says nothing about the other jobs, which go
    on holding what their own last sample said; before its first sample a job holds nothing.
    """

    def __init__(
        self,
        seconds: ArrayLike = (),
        job: ArrayLike = (),
        bytes: ArrayLike = (),
        names: Sequence[str] = (),
    ) -> None:
        """Take the columns; raises ReportError if they differ in length or name an unknown job."""
        self.seconds: FloatArray = _column("timeline seconds", seconds, np.float64)
        self.job: IntArray = _column("timeline job", job, np.int32)
        self.bytes: BytesArray = _column("timeline bytes", bytes, np.int64)
        self.names: list[str] = list(names)
        _check_columns("timeline", [self.seconds, self.job, self.bytes], self.job, self.names)

    def __len__(self) -> int:
        return len(self.seconds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return self.names == other.names and _same_columns(self, other, "seconds", "job", "bytes")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Timeline({len(self)} samples of {len(self.names)} jobs)"

    def bands(self) -> tuple[FloatArray, BytesArray]:
        """Return (seconds[T], bytes[jobs, T]): what every job held from each moment on, sorted."""
        # Lanes append on their own, so samples may be slightly out of order; equal times keep
        # theirs.
        order = np.argsort(self.seconds, kind="stable")
        seconds, job, held = self.seconds[order], self.job[order], self.bytes[order]
        positions = np.arange(len(order))
        bands = np.zeros((len(self.names), len(order)), dtype=np.int64)
        for index in range(len(self.names)):
            latest = np.maximum.accumulate(np.where(job == index, positions, -1))
            known = latest >= 0
            bands[index, known] = held[latest[known]]
        return seconds, bands

    def peak_bytes(self) -> int:
        """Return the most bytes that all jobs held together at any sample."""
        _, bands = self.bands()
        return int(bands.sum(axis=0).max(initial=0))


class Span(NamedTuple):
    """One node group that ran: seconds count from the start of the run."""

    lane: int
    job: str
    step: int
    group: int
    start: float
    stop: float


class Spans:
    """The node groups that ran, as columns; iterating yields them as Span, as recorded."""

    def __init__(
        self,
        lane: ArrayLike = (),
        job: ArrayLike = (),
        step: ArrayLike = (),
        group: ArrayLike = (),
        start: ArrayLike = (),
        stop: ArrayLike = (),
        names: Sequence[str] = (),
    ) -> None:
        """Take the columns; `job` indexes `names`. Raises ReportError if they do not fit."""
        self.lane: IntArray = _column("spans lane", lane, np.int32)
        self.job: IntArray = _column("spans job", job, np.int32)
        self.step: BytesArray = _column("spans step", step, np.int64)
        self.group: IntArray = _column("spans group", group, np.int32)
        self.start: FloatArray = _column("spans start", start, np.float64)
        self.stop: FloatArray = _column("spans stop", stop, np.float64)
        self.names: list[str] = list(names)
        columns: list[NDArray[Any]] = [self.lane, self.job, self.step, self.group]
        columns += [self.start, self.stop]
        _check_columns("spans", columns, self.job, self.names)

    def __len__(self) -> int:
        return len(self.lane)

    def __iter__(self) -> Iterator[Span]:
        columns = (self.lane, self.job, self.step, self.group, self.start, self.stop)
        for lane, job, step, group, start, stop in zip(*(c.tolist() for c in columns), strict=True):
            yield Span(lane, self.names[job], step, group, start, stop)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spans):
            return NotImplemented
        columns = ("lane", "job", "step", "group", "start", "stop")
        return self.names == other.names and _same_columns(self, other, *columns)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Spans({len(self)} node groups of {len(self.names)} jobs)"


def _column(what: str, values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    column = np.asarray(values)
    if column.size == 0:
        column = column.astype(dtype)
    # A float that says 1.5 bytes, or a job 2^40, must not be cut to fit without a word.
    elif np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)  # type: ignore[type-var]
        if column.dtype.kind not in "iu" or column.min() < limits.min or column.max() > limits.max:
            raise ReportError(f"{what} must be integers of {limits.bits} bits")
    elif column.dtype.kind not in "iuf" or not np.isfinite(column).all():
        raise ReportError(f"{what} must be finite numbers")
    return np.ascontiguousarray(column, dtype=dtype)


def _check_columns(what: str, columns: list[NDArray[Any]], job: IntArray, names: list[str]) -> None:
    if any(column.ndim != 1 for column in columns):
        raise ReportError(f"the columns of {what} must have one dimension each")
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ReportError(f"the columns of {what} must be equally long, not {lengths}")
    if len(job) and not 0 <= job.min() <= job.max() < len(names):
        raise ReportError(f"{what} must use job numbers from 0 to {len(names) - 1}")


def _same_columns(left: object, right: object, *columns: str) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
