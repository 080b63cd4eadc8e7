"""Where each node group of a round goes: the arrangements that Waterwave's policies try.

An arrangement gives every group an index, the number of the pair it runs in. Indices grow
strictly along a job, and no more groups share an index than there are lanes; which lane a group
takes inside its pair changes neither memory nor time, so lanes are dealt at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waterflow.partitioner.groups import NodeGroup, num_allocation_groups
from waterflow.partitioner.profile import FloatArray, IntArray, Profile
from waterflow.partitioner.schedule import GroupRef, Pair

PAIR_SECONDS = 30e-6
"""What a pair costs beside its work: the barrier and the lanes' waits for each other.

Two thread wake-ups and an event record and wait per lane are tens of microseconds. Without this
cost the finest split would always win.
"""

MAX_TRIES = 40
"""Offsets tried per arrangement; a longer range is sampled evenly, which bounds the time."""


@dataclass(frozen=True, eq=False)
class GroupTable:
    """All groups of all jobs as columns, job after job: bytes and seconds, no objects."""

    net: FloatArray
    growth: IntArray
    seconds: FloatArray
    first: tuple[int, ...]
    """Row of each job's first group, and the number of rows."""
    num_ang: tuple[int, ...]

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[NodeGroup]],
        profiles: Sequence[Profile],
        times: Sequence[FloatArray],
    ) -> GroupTable:
        """The table of ``groups``; ``times`` are seconds per node of each job."""
        rows = [group for job in groups for group in job]
        seconds = [
            np.add.reduceat(time, [group.start for group in job])
            for job, time in zip(groups, times, strict=True)
        ]
        return cls(
            # Floats, since bincount adds floats; exact up to 2**53 bytes.
            net=np.array([group.net_bytes for group in rows], dtype=np.float64),
            growth=np.array([group.growth_bytes for group in rows], dtype=np.int64),
            seconds=np.concatenate(seconds),
            first=tuple(np.cumsum([0, *map(len, groups)]).tolist()),
            num_ang=tuple(map(num_allocation_groups, groups, profiles)),
        )

    @property
    def num_jobs(self) -> int:
        """Number of jobs."""
        return len(self.num_ang)

    def count(self, job: int) -> int:
        """Number of groups of a job."""
        return self.first[job + 1] - self.first[job]

    def rows(self, job: int) -> slice:
        """The rows of a job."""
        return slice(self.first[job], self.first[job + 1])

    @property
    def longest(self) -> int:
        """The largest number of groups of any job."""
        return max(self.count(job) for job in range(self.num_jobs))

    def by_group_bytes(self) -> list[int]:
        """Jobs in descending order of their groups' mean size (Waterwave, Algorithm 1, line 1)."""
        sizes = [float(np.abs(self.net[self.rows(job)]).mean()) for job in range(self.num_jobs)]
        return sorted(range(self.num_jobs), key=lambda job: (-sizes[job], job))

    def by_seconds(self) -> list[int]:
        """Jobs by the time of their steps, longest first."""
        times = [float(self.seconds[self.rows(job)].sum()) for job in range(self.num_jobs)]
        return sorted(range(self.num_jobs), key=lambda job: (-times[job], job))

    def peak(self, index: IntArray) -> int:
        """Worst-order transient peak, in bytes, when row i runs in pair ``index[i]``."""
        net = np.bincount(index, weights=self.net)
        growth = np.bincount(index, weights=self.growth)
        return int((np.cumsum(net) - net + growth).max())

    def cost(self, index: IntArray) -> float:
        """Predicted seconds of the round: the longest group of each pair, and the pairs' cost."""
        longest = np.zeros(int(index.max()) + 1)
        np.maximum.at(longest, index, self.seconds)
        return float(longest.sum()) + PAIR_SECONDS * len(longest)


def algorithm_1(table: GroupTable, order: Sequence[int], p: int) -> IntArray:
    """Waterwave's Algorithm 1: allocation groups in a row, deallocation groups in another.

    ``p`` allocation groups of the second job run beside the last ones of the first job, at most
    as many as either has; below 0, every job begins that many pairs late, at most when all
    before it is done. Two repairs to the algorithm as printed: a job's next group always comes
    after its last one (printed, ``idx2`` may lie before the job's last allocation group), and
    the deallocation groups of the last job stay in the allocation row, where successive indices
    are free (printed, they alternate between the rows once ``idx1`` has caught up with ``idx2``,
    which puts two of them at one index).
    """
    index = np.empty(table.first[-1], dtype=np.int64)
    first_ang = table.num_ang[order[0]]
    idx1, idx2 = 0, first_ang
    end = 0  # one after the last index in use
    for rank, job in enumerate(order):
        mine = index[table.rows(job)]
        num_ang = table.num_ang[job]
        early = 0
        if rank == 1 and p > 0:
            early = min(p, num_ang, first_ang)
            mine[:early] = np.arange(first_ang - early, first_ang)
        if rank > 0 and p < 0:
            idx1 = min(idx1 - p, end)
        mine[early:num_ang] = np.arange(idx1, idx1 + num_ang - early)
        idx1 += num_ang - early
        after = int(mine[num_ang - 1]) + 1
        last = rank > 0 and rank == len(order) - 1
        start = max(idx1 if last else idx2, after)
        mine[num_ang:] = np.arange(start, start + len(mine) - num_ang)
        if not last:
            idx2 = start + len(mine) - num_ang
        end = max(end, int(mine[-1]) + 1)
    return index


def staggered(table: GroupTable, order: Sequence[int], delay: int, lanes: int) -> IntArray:
    """Whole steps side by side: each job begins ``delay`` pairs after the one before it.

    It begins at the latest when the one before it is done, and its groups take the first indices
    that have a lane free. The printed algorithm leaves a lane idle in much of the round when
    memory is ample or lanes are more than two; this arrangement fills them.
    """
    index = np.empty(table.first[-1], dtype=np.int64)
    used = np.zeros(table.first[-1], dtype=np.int64)  # groups at each index
    start = 0
    for job in order:
        mine = index[table.rows(job)]
        mine[:] = np.flatnonzero(used[start:] < lanes)[: len(mine)] + start
        used[mine] += 1
        start = int(min(mine[0] + delay, mine[-1] + 1))
    return index


def interleaved(table: GroupTable, order: Sequence[int], lanes: int, most_open: int) -> IntArray:
    """Steps taking turns: each pair runs the jobs that have the most time left.

    At most ``most_open`` jobs are begun and not finished, so memory must hold that many. Three
    equal jobs on two lanes take the time of one and a half this way, of two when ``staggered``.
    """
    index = np.empty(table.first[-1], dtype=np.int64)
    seconds = table.seconds.tolist()
    left = {job: sum(seconds[table.rows(job)]) for job in order}
    following = {job: table.first[job] for job in order}
    waiting = [(rank, job) for rank, job in enumerate(order)][::-1]
    ready = [(-left[job], rank, job) for rank, job in waiting[-most_open:]]
    del waiting[-most_open:]
    heapq.heapify(ready)
    place = 0
    while ready:
        running = [heapq.heappop(ready) for _ in range(min(lanes, len(ready)))]
        for _, rank, job in running:
            row = following[job]
            index[row] = place
            left[job] -= seconds[row]
            following[job] = row + 1
            if following[job] == table.first[job + 1]:
                if not waiting:
                    continue
                rank, job = waiting.pop()
            heapq.heappush(ready, (-left[job], rank, job))
        place += 1
    return index


def arrangements(
    table: GroupTable, spare_groups: int, lanes: int, published: bool = False
) -> Iterator[IntArray]:
    """Every arrangement worth a try on two or more lanes.

    ``spare_groups`` is Waterwave's choice of p: how many groups of split size fit beside the
    first job's peak, less one. ``published``: only those that Algorithm 1 can make.
    """
    order = table.by_group_bytes()
    most = min(table.num_ang[job] for job in order[:2])
    if published:
        for p in _sample(most, 0, min(spare_groups, most)):
            yield algorithm_1(table, order, p)
        return
    for p in _sample(most, -table.longest, min(spare_groups, most)):
        yield algorithm_1(table, order, p)
    order = table.by_seconds()
    for minus_delay in _sample(0, -table.longest):
        yield staggered(table, order, -minus_delay, lanes)
    if table.num_jobs > lanes:
        for most_open in sorted({lanes + 1, table.num_jobs}):
            yield interleaved(table, order, lanes, most_open)


def deal_lanes(table: GroupTable, index: IntArray, lanes: int) -> tuple[Pair, ...]:
    """Pairs from an arrangement: a job stays on its lane as long as that lane is free for it.

    Empty pairs are left out.
    """
    at: dict[int, list[GroupRef]] = {}
    for job in range(table.num_jobs):
        for group, place in enumerate(index[table.rows(job)].tolist()):
            at.setdefault(place, []).append(GroupRef(job, group))
    pairs: list[Pair] = []
    previous: dict[int, tuple[int, int]] = {}  # job -> its last index and lane
    for place in sorted(at):
        pair: list[GroupRef | None] = [None] * lanes
        newcomers = []
        # Who ran last has the first claim to a lane.
        for ref in sorted(at[place], key=lambda ref: -previous.get(ref.job, (-1, 0))[0]):
            lane = previous.get(ref.job, (-1, lanes))[1]
            if lane < lanes and pair[lane] is None:
                pair[lane] = ref
            else:
                newcomers.append(ref)
        for ref in newcomers:
            pair[pair.index(None)] = ref
        for lane, taken in enumerate(pair):
            if taken is not None:
                previous[taken.job] = (place, lane)
        pairs.append(tuple(pair))
    return tuple(pairs)


def _sample(high: int, low: int, *always: int) -> list[int]:
    """Numbers from ``high`` down to ``low``, at most about MAX_TRIES, ``always`` among them."""
    if high - low < MAX_TRIES:
        return list(range(high, low - 1, -1))
    even: npt.NDArray[np.int64] = np.linspace(high, low, MAX_TRIES).astype(np.int64)
    inside = [number for number in always if low <= number <= high]
    return sorted({*even.tolist(), *inside}, reverse=True)
