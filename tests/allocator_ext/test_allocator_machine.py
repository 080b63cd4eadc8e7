"""The allocator against a naive model that searches all chunks for every request."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

LANES = 3
CAPACITY = 8192
LIVE, UNSYNCED, SYNCED = _C.ChunkState.LIVE, _C.ChunkState.UNSYNCED, _C.ChunkState.SYNCED

lanes = st.integers(-1, LANES - 1)
jobs = st.integers(0, 2)
sizes = st.one_of(st.integers(1, 3000), st.sampled_from([64, 128, 640]))
Range = tuple[int, int]  # bytes, offset: sorted, the best fit comes first


@dataclass
class Owned:
    """A live chunk of the model."""

    bytes: int
    job: int
    users: set[int] = field(default_factory=set)


def rounded(size: int) -> int:
    return -(-size // 64) * 64


def best(ranges: list[Range], wanted: int) -> int | None:
    return min(((size, at) for size, at in ranges if size >= wanted), default=(0, None))[1]


def best_with_tail_last(ranges: list[Range], wanted: int, capacity: int) -> int | None:
    tail = [(size, at) for size, at in ranges if at + size == capacity]
    found = best([item for item in ranges if item not in tail], wanted)
    return best(tail, wanted) if found is None else found


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = _C.Allocator(CAPACITY, lanes=LANES)
        self.allocator.record(True)
        self.capacity = CAPACITY
        self.live: dict[int, Owned] = {}
        self.limits: dict[int, int | None] = {}

    def held(self, job: int) -> int:
        return sum(owned.bytes for owned in self.live.values() if owned.job == job)

    def over_limit(self, job: int, size: int) -> bool:
        limit = self.limits.get(job)
        return limit is not None and self.held(job) + size > limit

    def pick(self, index: int) -> int:
        return sorted(self.live)[index % len(self.live)]

    def gaps(self) -> list[Range]:
        """Free ranges as they would be after a sync, from the model alone."""
        result, end = [], 0
        for offset, size in [*((at, self.live[at].bytes) for at in sorted(self.live)),
                             (self.capacity, 0)]:  # fmt: skip
            if offset > end:
                result.append((offset - end, end))
            end = offset + size
        return result

    def expected(self, size: int, lane: int, may_sync: bool) -> int | None:
        chunks = self.allocator.chunks()
        own = [(c.bytes, c.offset) for c in chunks if c.state == UNSYNCED and c.lane == lane >= 0]
        found = best(own, size)
        if found is None:
            synced = [(c.bytes, c.offset) for c in chunks if c.state == SYNCED]
            found = best_with_tail_last(synced, size, self.capacity)
        if found is None and may_sync:
            found = best_with_tail_last(self.gaps(), size, self.capacity)
        return found

    def forget_users(self) -> None:
        for owned in self.live.values():
            owned.users.clear()

    def own(self, offset: int, size: int, lane: int, job: int) -> None:
        self.live[offset] = Owned(size, job, {lane})

    @rule(size=sizes, lane=lanes, job=jobs, may_sync=st.booleans())
    def allocate(self, size: int, lane: int, job: int, may_sync: bool) -> None:
        wanted = rounded(size)
        expected = None
        if not self.over_limit(job, wanted):
            expected = self.expected(wanted, lane, may_sync)
        syncs = self.allocator.forced_syncs()
        offset = self.allocator.allocate(size, lane, job, may_sync)
        assert offset == expected
        if self.allocator.forced_syncs() > syncs:
            self.forget_users()
        if offset is not None:
            self.own(offset, wanted, lane, job)

    @rule(unit=st.integers(0, CAPACITY // 64), size=sizes, lane=lanes, job=jobs)
    def allocate_at(self, unit: int, size: int, lane: int, job: int) -> None:
        offset, wanted = unit * 64, rounded(size)
        touched = [c for c in self.allocator.chunks()
                   if c.offset < offset + wanted and offset < c.offset + c.bytes]  # fmt: skip
        usable = all(
            c.state == SYNCED or (c.state == UNSYNCED and c.lane == lane >= 0) for c in touched
        )
        fits = offset + wanted <= self.capacity and not self.over_limit(job, wanted)
        assert self.allocator.allocate_at(offset, size, lane, job) == (usable and fits)
        if usable and fits:
            self.own(offset, wanted, lane, job)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 1000), lane=lanes)
    def use(self, index: int, lane: int) -> None:
        offset = self.pick(index)
        self.allocator.use(offset, lane)
        self.live[offset].users.add(lane)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 1000), lane=lanes)
    def free(self, index: int, lane: int) -> None:
        offset = self.pick(index)
        users = self.live.pop(offset).users | {lane}
        self.allocator.free(offset, lane)
        [chunk] = [c for c in self.allocator.chunks() if c.offset <= offset < c.offset + c.bytes]
        assert chunk.state == UNSYNCED
        assert chunk.lane == (users.pop() if len(users) == 1 else _C.NO_LANE)
        with pytest.raises(_C.UnknownChunk):
            self.allocator.free(offset, lane)

    @rule()
    def synchronize(self) -> None:
        self.allocator.synchronize()
        self.forget_users()
        free = [(c.bytes, c.offset) for c in self.allocator.chunks() if c.state != LIVE]
        assert free == self.gaps()

    @rule(job=jobs, limit=st.one_of(st.none(), st.integers(0, CAPACITY)))
    def set_limit(self, job: int, limit: int | None) -> None:
        self.allocator.set_limit(job, limit)
        self.limits[job] = limit
        assert self.allocator.limit(job) == limit

    @rule(units=st.integers(1, 2 * CAPACITY // 64))
    def resize(self, units: int) -> None:
        tail = self.allocator.chunks()[-1]
        possible = units * 64 >= self.capacity or (
            tail.state == SYNCED and tail.offset <= units * 64
        )
        assert self.allocator.resize(units * 64) == possible
        if possible:
            self.capacity = units * 64

    @invariant()
    def accounts_agree(self) -> None:
        allocator = self.allocator
        live = {c.offset: (c.bytes, c.job) for c in allocator.chunks() if c.state == LIVE}
        assert live == {at: (owned.bytes, owned.job) for at, owned in self.live.items()}
        assert allocator.live() == sum(size for size, _ in live.values())
        assert allocator.capacity() == self.capacity == allocator.live() + allocator.free_bytes()
        assert all(allocator.held(job) == self.held(job) for job in range(3))
        assert allocator.largest_free() == max(self.gaps(), default=(0, 0))[0]
        allocator.check_consistency()

    def teardown(self) -> None:
        assert _C.check_happens_before(self.allocator.take_log(), LANES) == []


AllocatorMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase
