"""Footprints of a job as a function of its batch size, from three captures.

Nearly every storage of a step grows by the same number of bytes with each sample: its size is
``a * batch + c``. Two captures give a and c of every storage, operator and byte moved, in whole
numbers; a third, larger one has to agree in everything. Then any batch size is a matter of
arithmetic. Where they do not agree (sizes that grow with the square of the batch, a model that does
something else for large batches) each batch size asked for is captured by itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from waterflow.capture.fake_job import BuiltJob, build, name_of
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common.errors import CaptureError, ConstantShapesError, JobError, RunOnlyError
from waterflow.executor.profile.fake import StepWalk
from waterflow.job.job import Job
from waterflow.partitioner.profile import IntArray
from waterflow.study.footprint import Footprint, RawFootprint, capture_built
from waterflow.study.footprint_cache import key_of, load, store

#: Batch sizes to capture, the last one to verify; the next row where a factory refuses one. Few
#: other dimensions are 7 or 13, so that nothing matches the batch by accident.
_SIZES = ((7, 13, 61), (8, 24, 64), (32, 96, 256))
#: Sizes of one are special: they broadcast, and every order of dimensions is contiguous.
_DEGENERATE = 1
_LARGEST = 2**62
#: Instructions of a step whose graph takes much memory, tens of kilobytes each.
_LARGE_GRAPH = 5000

JobFactory = Callable[[int], Job]
"""Makes a job for a batch size."""


class FootprintModel:
    """A job's footprints by batch size; see `footprint_model`.

    Attributes:
        name: the jobs' name in the footprints.
        alignment: bytes that the arena rounds up to.
    """

    def __init__(
        self, make: JobFactory, name: str, alignment: int, key: str | None, line: _Line | None
    ) -> None:
        self.name = name
        self.alignment = alignment
        self._make = make
        self._key = key
        self._line = line
        self._captured: dict[int, RawFootprint] = {}

    @property
    def is_affine(self) -> bool:
        """Whether footprints are computed; otherwise each one is a capture, kept on disk."""
        return self._line is not None

    def at(self, batch: int) -> Footprint:
        """The footprint at a batch size.

        Raises:
            JobError: the batch size is no whole number above 0, or larger than numbers go.
            JobError, CaptureError: it has to be captured, and cannot be.
        """
        if type(batch) is not int or batch < 1:
            raise JobError(
                f"job {self.name!r}: the batch size must be a whole number above 0, got {batch!r}"
            )
        return self._raw(batch).at(self.alignment, self.name)

    def _raw(self, batch: int) -> RawFootprint:
        if self._line is not None and batch > _DEGENERATE:
            self._check_range(self._line, batch)
            computed = self._line.at(batch)
            if computed is not None:
                return computed
        if batch not in self._captured:
            self._captured[batch] = self._capture(batch)
        return self._captured[batch]

    def _check_range(self, line: _Line, batch: int) -> None:
        if line.largest(batch) >= _LARGEST:
            raise JobError(
                f"job {self.name!r}: at a batch size of {batch} its step would move more than "
                f"{_LARGEST} bytes, which no machine does; ask for a smaller one"
            )

    def _capture(self, batch: int) -> RawFootprint:
        what = name_of(self._make)
        with TRACE_LOCK:
            make = functools.partial(self._make, batch)
            built = build(make, what)
            key = key_of(self._make, built, "footprint", self._key)
            kept = load(key)
            if kept is not None:
                return kept[0]
            found = capture_built(built, make, what)
            store(key, found)
            return found


def footprint_model(
    make: JobFactory, *, name: str, key: str | None = None, alignment: int = 64
) -> FootprintModel:
    """A job's footprints as a function of its batch size.

    Three captures the first time. They are kept on disk under a digest of all that they depend on:
    the code and the state of factory, model, optimizer, loss and data, source files, versions and
    torch's flags. Where some of that cannot be seen (a factory that reads files, objects of C
    extensions) they are made anew by each process.

    Args:
        make: makes the job for a batch size: model, optimizer and data, all new. It is called
            without memory, see `forecast`.
        name: the jobs' name in the footprints.
        key: where not everything can be seen: a text that the caller changes whenever what cannot
            be seen does. With it the captures are kept all the same.
        alignment: bytes that the arena rounds up to: 64 on the host, 512 on a GPU.

    Raises:
        JobError: the factory raises.
        ConstantShapesError: its shapes do not depend on the batch size.
        RunOnlyError: the job's memory is known only by running it.
        CaptureError: the job's step cannot be captured exactly.
    """
    errors: list[JobError | CaptureError] = []
    for sizes in _SIZES:
        try:
            with TRACE_LOCK:
                line = _line(make, name, key, sizes)
            return FootprintModel(make, name, alignment, key, line)
        except (ConstantShapesError, RunOnlyError):
            raise
        except (JobError, CaptureError) as error:  # it may take batches of certain sizes only
            errors.append(error)
    raise errors[0]


@dataclass(frozen=True, eq=False)
class _Line:
    """All numbers of a footprint as functions ``slope * batch + start`` of the batch size.

    Attributes:
        pattern: one of the footprints; the others differ from it in numbers alone.
        slope, start: int64, for each of its numbers; see `_numbers`.
    """

    pattern: RawFootprint
    slope: IntArray
    start: IntArray

    def at(self, batch: int) -> RawFootprint | None:
        """The footprint at a batch size; None where it would have an empty block."""
        numbers = self.slope * batch + self.start
        found = _with_numbers(self.pattern, numbers)
        if (numbers < 0).any() or any((walk.sizes == 0).any() for walk in _walks(found)):
            return None
        return found

    def largest(self, batch: int) -> int:
        """A bound on every sum of its numbers at a batch size, computed without overflow."""
        return sum(map(abs, self.slope.tolist())) * batch + sum(map(abs, self.start.tolist()))


def _line(make: JobFactory, name: str, key: str | None, sizes: Sequence[int]) -> _Line | None:
    """The line through the footprints at these sizes; None where there is none."""
    what = name_of(make)
    built = build(functools.partial(make, sizes[0]), what)
    stored_under = key_of(make, built, f"family of {sizes}", key)
    kept = load(stored_under)
    if kept is not None:
        pattern, numbers = kept
        line = _Line(pattern, numbers["slope"], numbers["start"]) if numbers else None
        if line is None or len(line.slope) == len(line.start) == len(_numbers(pattern)):
            return line
    footprints = _captures(make, what, sizes, built)
    del built
    line = _fit(footprints, sizes)
    if line is not None:
        _check_slopes(line, name, what)
        store(stored_under, line.pattern, slope=line.slope, start=line.start)
    else:
        store(stored_under, footprints[0])
    return line


def _captures(
    make: JobFactory, what: str, sizes: Sequence[int], first: BuiltJob
) -> list[RawFootprint]:
    traces = OptimizerTraces()
    found: list[RawFootprint] = []
    for size in sizes:
        make_one = functools.partial(make, size)
        built = first if not found else build(make_one, what)
        found.append(capture_built(built, make_one, what, traces))
        del built
        if len(found[-1].steady.operators) > _LARGE_GRAPH:
            gc.collect()  # graphs are full of cycles; this one must not stay beside the next
    return found


def _fit(footprints: Sequence[RawFootprint], sizes: Sequence[int]) -> _Line | None:
    one, two, check = footprints
    if not (_alike(one, two) and _alike(one, check)):
        return None
    near, far = _numbers(one), _numbers(two)
    slope, rest = np.divmod(far - near, sizes[1] - sizes[0])
    start = near - slope * sizes[0]
    if rest.any() or not np.array_equal(slope * sizes[2] + start, _numbers(check)):
        return None
    return _Line(one, slope, start)


def _check_slopes(line: _Line, name: str, what: str) -> None:
    blocks = _with_numbers(line.pattern, line.slope)
    if not any(walk.sizes.any() for walk in _walks(blocks)):
        raise ConstantShapesError(
            f"job {name!r}: its shapes do not depend on the batch size; {what} must make its data "
            "from the batch size that it is given"
        )


# Footprints as vectors of numbers


def _walks(footprint: RawFootprint) -> list[StepWalk]:
    return [walk for walk in (footprint.first, footprint.steady) if walk is not None]


def _parts(footprint: RawFootprint) -> list[IntArray]:
    walks = _walks(footprint)
    found = [array for w in walks for array in (w.sizes, w.flops, w.moved_bytes)]
    return [*found, footprint.persistent]


def _numbers(footprint: RawFootprint) -> IntArray:
    return np.concatenate(_parts(footprint))


def _with_numbers(pattern: RawFootprint, numbers: IntArray) -> RawFootprint:
    """A footprint of the same form with other numbers."""
    ends = np.cumsum([len(part) for part in _parts(pattern)])
    pieces = iter(np.split(numbers, ends[:-1]))
    walks = [
        replace(walk, sizes=next(pieces), flops=next(pieces), moved_bytes=next(pieces))
        for walk in _walks(pattern)
    ]
    first = walks[0] if pattern.first is not None else None
    return RawFootprint(first, walks[-1], next(pieces))


def _alike(one: RawFootprint, other: RawFootprint) -> bool:
    """Whether two footprints are of the same operators and events, and differ in numbers alone."""
    left, right = _walks(one), _walks(other)
    return (
        len(left) == len(right)
        and len(one.persistent) == len(other.persistent)
        and all(map(_same_events, left, right))
    )


def _same_events(one: StepWalk, other: StepWalk) -> bool:
    return (
        one.operators == other.operators
        and one.boundary == other.boundary
        and np.array_equal(one.event_nodes, other.event_nodes)
        and np.array_equal(one.event_blocks, other.event_blocks)
        and np.array_equal(one.allocates, other.allocates)
    )
