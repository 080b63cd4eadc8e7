"""Jobs that wait, in order: by level, and within a level by rank.

A level keeps one sorted list for each tenant with a quota and number of GPUs. Whoever looks for
jobs that fit what is free, and what quotas leave, passes by all lists of larger jobs at once, so a
decision costs what it starts, not what waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from waterflow.cluster.quotas import Account, Allowance

Rank = tuple[float, ...]


class Head(NamedTuple):
    """The first job of a list: sorted by rank, then number."""

    rank: Rank
    job: int
    gpus: int
    account: Account
    position: int


_Lists = dict[tuple[Account, int], list[tuple[Rank, int]]]


class Level:
    """The waiting jobs of one level."""

    def __init__(self) -> None:
        self._lists: _Lists = {}
        self.count = 0
        self.gpus = 0

    def add(self, gpus: int, rank: Rank, index: int, account: Account = None) -> None:
        """A job waits from now on."""
        insort(self._lists.setdefault((account, gpus), []), (rank, index))
        self.count += 1
        self.gpus += gpus

    def remove(self, gpus: int, rank: Rank, index: int, account: Account = None) -> None:
        """A job waits no more."""
        jobs = self._lists[account, gpus]
        del jobs[bisect_left(jobs, (rank, index))]
        if not jobs:
            del self._lists[account, gpus]
        self.count -= 1
        self.gpus -= gpus

    def sizes(self) -> dict[tuple[Account, int], int]:
        """How many jobs wait, by account and GPUs."""
        return {kind: len(jobs) for kind, jobs in self._lists.items()}

    def walk(self, allowance: Allowance | None = None) -> Walk:
        """Look at the jobs, best rank first; those alone that `allowance`, if any, allows."""
        return Walk(self._lists, allowance)

    def __iter__(self) -> Iterator[int]:
        """The jobs' numbers, best rank first."""
        return iter(
            [index for _, index in sorted(j for jobs in self._lists.values() for j in jobs)]
        )


class Walk:
    """A way along the jobs of a level, best rank first.

    With an allowance it shows no job that its tenant's quota has no room for: `best` shows smaller
    ones of the tenant, `first` none that come after it; other tenants' jobs go on in either case.
    """

    def __init__(self, lists: _Lists, allowance: Allowance | None = None) -> None:
        self._lists = lists
        self._allowance = allowance
        self._heads = [Head(*jobs[0], gpus, account, 0) for (account, gpus), jobs in lists.items()]
        heapify(self._heads)

    def best(self, room: int, *, half: bool = False) -> Head | None:
        """The next job of at most `room` GPUs; `half`: whose half is, rounded down, 1 at least.

        Room only shrinks: larger ones are left behind.
        """
        allowance, heads = self._allowance, self._heads
        limit = 2 * room + 1 if half and room else room
        while heads:
            head = heads[0]
            if head.gpus <= limit:
                if allowance is None or head.account is None:
                    return head
                if allowance.fits(head.account, max(head.gpus // 2, 1) if half else head.gpus):
                    return head
            heappop(heads)
        return None

    def first(self) -> Head | None:
        """The next job, however large."""
        allowance, heads = self._allowance, self._heads
        while (
            heads and allowance is not None and not allowance.fits(heads[0].account, heads[0].gpus)
        ):
            allowance.close(heads[0].account)
            heappop(heads)
        return heads[0] if heads else None

    def take(self, gpus: int = 0) -> None:
        """The next job starts, on so many GPUs, or as many as it asks for; go on."""
        head = self._heads[0]
        if self._allowance is not None:
            self._allowance.take(head.account, gpus or head.gpus)
        self.next()

    def next(self) -> None:
        """Go on to the next job."""
        head = self._heads[0]
        jobs, position = self._lists[head.account, head.gpus], head.position + 1
        if position < len(jobs):
            heapreplace(self._heads, Head(*jobs[position], head.gpus, head.account, position))
        else:
            heappop(self._heads)

    def drop(self) -> None:
        """Leave all jobs of the next one's size behind: it does not fit, and neither will they."""
        heappop(self._heads)
