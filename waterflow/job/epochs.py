"""Data whose epochs have numbers, so that each job that reads it has the same batches in each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any


class NumberedEpochs(ABC):
    """Data that gives the same batches for an epoch whoever asks, whenever, and how often."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch 0, 1, ..."""


def begin_epoch(data: Iterable[Any], number: int) -> Iterator[Any]:
    """Begins an epoch of a job's data as the plain loop does."""
    return data.epoch(number) if isinstance(data, NumberedEpochs) else iter(data)
