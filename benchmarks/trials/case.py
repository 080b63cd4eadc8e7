"""What a row of the benchmark trains, whoever trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import waterflow as wf

#: Trains jobs to their ends; returns their losses, in the order of the jobs.
Train = Callable[[Sequence[wf.Job]], list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a case is run.

    Attributes:
        steps_fraction: of each trial's steps, of which one at least remains.
        most_trials: no more trials than that.
    """

    steps_fraction: float = 1.0
    most_trials: int | None = None

    def steps(self, full: int) -> int:
        return max(1, math.ceil(full * self.steps_fraction))

    def trials(self, full: int) -> int:
        return full if self.most_trials is None else min(full, self.most_trials)


class Case(Protocol):
    """A row: its size, and how its trials are handed to whoever trains them."""

    name: str
    trials: int
    steps: int
    stackable: bool  # whether vmap can take all trials as one model
    asks: bool  # whether later trials depend on how earlier ones ended

    def sized(self, size: Size) -> Case:
        """The same case, smaller."""

    def part(self, index: int, parts: int) -> Case:
        """The trials for one of several processes."""

    def prepare(self) -> None:
        """Loads data and libraries, which is not counted."""

    def run(self, train: Train) -> list[list[float]]:
        """Makes the trials, has them trained, and returns their losses."""


@dataclass(frozen=True, kw_only=True)
class JobsCase:
    """Trials that are all known from the beginning.

    Attributes:
        make: makes a trial's job from its number and its steps.
        steps: of each trial.
        numbers: the trials' numbers.
    """

    name: str
    make: Callable[[int, int], wf.Job]
    steps: int
    numbers: range
    stackable: bool = False
    asks: bool = False

    @property
    def trials(self) -> int:
        return len(self.numbers)

    def sized(self, size: Size) -> JobsCase:
        numbers = self.numbers[: size.trials(self.trials)]
        return replace(self, steps=size.steps(self.steps), numbers=numbers)

    def part(self, index: int, parts: int) -> JobsCase:
        return replace(self, numbers=self.numbers[index::parts])

    def prepare(self) -> None:
        self.make(0, self.steps)

    def run(self, train: Train) -> list[list[float]]:
        return train([self.make(number, self.steps) for number in self.numbers])
