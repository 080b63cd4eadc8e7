"""The memory of one job's data, where another job's data are in the same: whose steps write to it.

Batches from a list are the list's own tensors. Steps that change them in place are their job's own
affair, as in the plain loop, until another job reads the same tensors: what that one sees would
depend on who comes first. So eager steps of such jobs are given copies of what others have, and one
that has changed its copy ends its job. Captured steps are known to write to no batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.capture.data_tensors import makes_batches_anew, tensors_in
from waterflow.common.errors import JobError
from waterflow.common.spans import Spans
from waterflow.engine.shared import SharedData
from waterflow.job.batch_copy import copied
from waterflow.steps.same_bits import same_contents

_REMEDY = (
    "give each job its own copy of the data (copy.deepcopy), wf.shared(data), or change a clone of "
    "the batch"
)
#: Where data lie that nobody could look through.
_ANYWHERE = Spans([(0, 1 << 63)])


class DataMemory:
    """What a job's data hold in memory."""

    def __init__(self, name: str, data: Any) -> None:
        self._name = name
        self._hands_out = not (isinstance(data, SharedData) or makes_batches_anew(data))
        self._data = data.source if isinstance(data, SharedData) else data
        self._shared = Spans()  # with other jobs' data
        self._shared_addresses: Any = None  # the same for the extension
        self._written = Spans()  # by its steps, as far as torch tells
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []  # theirs, as they were
        self._lent: Any = None  # versions of what a step has

    @functools.cached_property
    def _tensors(self) -> list[torch.Tensor] | None:
        """What `tensors_in` finds, which may take a long walk; forgotten after each `join`, as data
        may let go of some."""
        return tensors_in(self._data)

    @functools.cached_property
    def _spans(self) -> Spans:
        return _ANYWHERE if self._tensors is None else Spans(map(_span, self._tensors))

    def join(self, others: Iterable[DataMemory]) -> None:
        """The job comes to these, which are under way: memory that batches of one of two may lie
        in, and the other's data, too, is looked after from now on.

        Raises:
            JobError: another job's steps are known to change this one's data in place.
        """
        met = [self]
        try:
            self._join(others, met)
        finally:
            for one in met:
                one.__dict__.pop("_tensors", None)

    def _join(self, others: Iterable[DataMemory], met: list[DataMemory]) -> None:
        left: Spans | None = None  # what is not known to be looked after by all who have it
        for other in others:
            if not (self._hands_out or other._hands_out):
                continue
            met.append(other)
            left = self._spans if left is None else left
            common = left if self._data is other._data else left & other._spans
            if not common:
                continue
            if common & other._written:
                raise JobError(
                    f"job {self._name!r} has tensors as data that the steps of job "
                    f"{other._name!r}, which is under way, change in place: {_REMEDY}"
                )
            for one in (self, other):
                one._watch(common)
            if other._hands_out:  # it has met those before it, and these have met it
                left -= common
                if not left:
                    return

    def _watch(self, common: Spans) -> None:
        """What others have is watched, but for tensors that are watched already."""
        if not common - self._shared:
            return
        shared = self._shared

        @functools.cache  # most tensors are rows of a few
        def is_new(start: int, end: int) -> bool:
            return common.meets(start, end) and not shared.meets(start, end)

        for one in {id(one): one for one in self._tensors or ()}.values():
            if is_new(*_span(one)):
                self._watched.append(one)
                self._versions.append(_version(one))
        self._shared |= common
        self._shared_addresses = _C.Addresses(*map(list, zip(*self._shared, strict=True)))

    def check(self) -> None:
        """Whether what several jobs read is as it was.

        Raises:
            JobError: somebody's Python, which was given no copy, has changed it in place.
        """
        if list(map(_version, self._watched)) != self._versions:
            raise JobError(
                f"job {self._name!r}: its data were changed in place while another job had the "
                f"same tensors as data, so that its numbers depend on when: {_REMEDY}"
            )

    def lend(self, batch: Any) -> Any:
        """What an eager step is given for a batch; one step at a time."""
        if not self._hands_out:
            return batch
        if self._shared:
            with contextlib.suppress(Exception):  # what cannot be copied is watched
                return copied(batch, within=self._shared_addresses)
        self._lent = _C.Versions(batch)
        return batch

    def take_back(self, lent: Any, batch: Any) -> None:
        """The step has been made.

        Raises:
            JobError: it has changed what another job reads.
        """
        if not self._hands_out:
            return
        if lent is not batch:
            if not (_C.have_same_bits(lent, batch) or same_contents(lent, batch)):
                raise JobError(
                    f"job {self._name!r}: its step changes its batch in place, and another job has "
                    f"the same tensors as data: {_REMEDY}"
                )
            return
        if written := self._lent.changed():
            self._written |= Spans(map(_span, written))
        self._lent = None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _version(tensor: torch.Tensor) -> int:
    """Grows with each change in place that torch tells of."""
    return 0 if tensor.is_inference() else tensor._version
