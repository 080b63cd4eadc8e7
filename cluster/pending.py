"""Jobs that wait, in order: by level, and within a level by rank.

A level keeps one sorted list for each number of GPUs. Whoever looks for jobs that fit what is
free passes by all lists of larger jobs at once, so a decision costs what it starts, not what waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

Rank = tuple[float, ...]


class Head(NamedTuple):
    """The first job of a list: sorted by rank, then number."""

    rank: Rank
    job: int
    gpus: int
    position: int


class Level:
    """The waiting jobs of one level."""

    def __init__(self) -> None:
        self._lists: dict[int, list[tuple[Rank, int]]] = {}
        self.count = 0
        self.gpus = 0

    def add(self, gpus: int, rank: Rank, index: int) -> None:
        """A job waits from now on."""
        insort(self._lists.setdefault(gpus, []), (rank, index))
        self.count += 1
        self.gpus += gpus

    def remove(self, gpus: int, rank: Rank, index: int) -> None:
        """A job waits no more."""
        jobs = self._lists[gpus]
        del jobs[bisect_left(jobs, (rank, index))]
        if not jobs:
            del self._lists[gpus]
        self.count -= 1
        self.gpus -= gpus

    def walk(self) -> Walk:
        """Look at the jobs, best rank first."""
        return Walk(self._lists)

    def __iter__(self) -> Iterator[int]:
        """The jobs' numbers, best rank first."""
        return iter(
            [index for _, index in sorted(j for jobs in self._lists.values() for j in jobs)]
        )


class Walk:
    """A way along the jobs of a level, best rank first."""

    def __init__(self, lists: dict[int, list[tuple[Rank, int]]]) -> None:
        self._lists = lists
        self._heads = [Head(*jobs[0], gpus, 0) for gpus, jobs in lists.items()]
        heapify(self._heads)

    def best(self, room: int) -> Head | None:
        """The next job of at most `room` GPUs. Room only shrinks: larger ones are left behind."""
        while self._heads and self._heads[0].gpus > room:
            heappop(self._heads)
        return self._heads[0] if self._heads else None

    def first(self) -> Head | None:
        """The next job, however large."""
        return self._heads[0] if self._heads else None

    def next(self) -> None:
        """Go on to the next job."""
        head = self._heads[0]
        jobs, position = self._lists[head.gpus], head.position + 1
        if position < len(jobs):
            heapreplace(self._heads, Head(*jobs[position], head.gpus, position))
        else:
            heappop(self._heads)

    def drop(self) -> None:
        """Leave all jobs of the next one's size behind: it does not fit, and neither will they."""
        heappop(self._heads)
