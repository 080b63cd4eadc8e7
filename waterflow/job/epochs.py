"""Data whose epochs have numbers, so that each job that reads it has the same batches in each; and
data of which a step takes several batches."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any


class NumberedEpochs(ABC):
    """Data that gives the same batches for an epoch whoever asks, whenever, and how often."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch 0, 1, ..."""


class MicroBatches(tuple[Any, ...]):
    """The batches of one step, where a job accumulates the gradients of several."""

    __slots__ = ()


def begin_epoch(data: Iterable[Any], number: int, accumulate: int = 1) -> Iterator[Any]:
    """Begins an epoch of a job's data as the plain loop does.

    Args:
        data: the job's.
        number: of the epoch (0, 1, ...).
        accumulate: how many of its batches are a step's.
    """
    begun = data.epoch(number) if isinstance(data, NumberedEpochs) else iter(data)
    return by_step(begun, accumulate)


def by_step(batches: Iterator[Any], accumulate: int) -> Iterator[Any]:
    """What steps take: the batches, or so many of them at a time; the last may have fewer."""
    return batches if accumulate == 1 else _groups(batches, accumulate)


def _groups(batches: Iterator[Any], size: int) -> Iterator[MicroBatches]:
    while group := MicroBatches(itertools.islice(batches, size)):
        yield group
        if len(group) < size:
            return


def steps_in(batches: int, accumulate: int) -> int:
    """Steps that so many batches of an epoch make."""
    return -(-batches // accumulate)
