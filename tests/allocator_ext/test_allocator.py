"""Placement rules of the allocator, literally: which offset, which state, which refusal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

LIVE, UNSYNCED, SYNCED = _C.ChunkState.LIVE, _C.ChunkState.UNSYNCED, _C.ChunkState.SYNCED


def layout(allocator: _C.Allocator) -> list[tuple[int, int, _C.ChunkState, int]]:
    return [(c.offset, c.bytes, c.state, c.lane) for c in allocator.chunks()]


def filled(allocator: _C.Allocator, sizes: list[int]) -> list[int]:
    offsets = [allocator.allocate(size, 0, 0) for size in sizes]
    assert None not in offsets
    return [offset for offset in offsets if offset is not None]


def test_sizes_round_up_and_split() -> None:
    allocator = _C.Allocator(1000)
    assert allocator.capacity() == 960
    assert allocator.allocate(1, 0, 0) == 0
    assert allocator.allocate(65, 1, 0) == 64
    assert layout(allocator) == [(0, 64, LIVE, 0), (64, 128, LIVE, 1), (192, 768, SYNCED, -1)]
    assert (allocator.live(), allocator.free_bytes(), allocator.extent()) == (192, 768, 192)


def test_best_fit_then_lowest_address() -> None:
    allocator = _C.Allocator(1 << 16)
    offsets = filled(allocator, [512, 64, 256, 64, 320, 64, 256, 64])
    for index in (0, 2, 4, 6):
        allocator.free(offsets[index], 0)
    assert allocator.allocate(250, 0, 0) == offsets[2]
    assert allocator.allocate(250, 0, 0) == offsets[6]
    assert allocator.allocate(250, 0, 0) == offsets[4]
    assert allocator.allocate(250, 0, 0) == offsets[0]


def test_own_unsynced_comes_before_a_better_synced_fit() -> None:
    allocator = _C.Allocator(1 << 16)
    offsets = filled(allocator, [128, 64, 512, 64])
    allocator.free(offsets[0], 0)
    allocator.synchronize()
    allocator.free(offsets[2], 0)
    assert allocator.allocate(128, 0, 0) == offsets[2]
    assert allocator.allocate(128, 1, 0) == offsets[0]


def test_the_tail_is_the_last_resort_even_if_it_fits_better() -> None:
    allocator = _C.Allocator(1024)
    offsets = filled(allocator, [640, 64, 64])  # leaves a tail of 256
    allocator.free(offsets[0], 0)
    allocator.synchronize()
    assert allocator.allocate(256, 0, 0) == 0


def test_neighbours_merge_with_their_own_kind_only() -> None:
    allocator = _C.Allocator(1024)
    offsets = filled(allocator, [64] * 6)
    for index, lane in [(0, 0), (1, 0), (3, 0), (4, 1)]:
        allocator.free(offsets[index], lane)  # 4: used by lanes 0 and 1, so for nobody
    assert layout(allocator) == [
        (0, 128, UNSYNCED, 0),
        (128, 64, LIVE, 0),
        (192, 64, UNSYNCED, 0),
        (256, 64, UNSYNCED, -1),
        (320, 64, LIVE, 0),
        (384, 640, SYNCED, -1),
    ]
    allocator.free(offsets[5], 0)  # between the shared and the synced: merges with neither
    assert len(allocator.chunks()) == 6
    assert allocator.largest_free() == 1024 - 192
    allocator.synchronize()
    assert layout(allocator) == [
        (0, 128, SYNCED, -1),
        (128, 64, LIVE, 0),
        (192, 832, SYNCED, -1),
    ]


def test_another_lane_forces_a_sync_only_when_it_helps() -> None:
    allocator = _C.Allocator(1024)
    offsets = filled(allocator, [512, 512])
    assert allocator.allocate(64, 1, 0) is None
    assert allocator.syncs() == 0
    allocator.free(offsets[0], 0)
    assert allocator.allocate(64, 1, 0, may_sync=False) is None
    assert allocator.allocate(1024, 1, 0) is None
    assert allocator.syncs() == 0
    assert allocator.allocate(64, 1, 0) == 0
    assert (allocator.forced_syncs(), allocator.explicit_syncs()) == (1, 0)


def test_a_lone_user_after_a_sync_owns_the_chunk() -> None:
    allocator = _C.Allocator(1024)
    offset = allocator.allocate(64, 0, 0)
    allocator.synchronize()
    allocator.free(offset, 1)
    assert layout(allocator)[0] == (0, 64, UNSYNCED, 1)


def test_no_lane_counts_as_every_lane() -> None:
    allocator = _C.Allocator(1024, lanes=1)
    offset = allocator.allocate(64, 0, 0)
    allocator.free(offset, _C.NO_LANE)
    assert layout(allocator)[0] == (0, 64, UNSYNCED, -1)
    assert allocator.allocate(960, _C.NO_LANE, 0) == 64
    assert allocator.allocate(64, 0, 0) == 0
    assert allocator.forced_syncs() == 1


def test_allocate_at_spans_own_and_synced_chunks() -> None:
    allocator = _C.Allocator(1024)
    offsets = filled(allocator, [64, 128, 128, 64])
    allocator.free(offsets[1], 0)
    allocator.synchronize()
    allocator.free(offsets[2], 0)
    assert not allocator.allocate_at(128, 128, 1, 0)  # the upper half is lane 0's
    assert not allocator.allocate_at(0, 64, 0, 0)  # live
    assert not allocator.allocate_at(1024, 64, 0, 0)  # outside
    assert not allocator.allocate_at(960, 128, 0, 0)
    assert allocator.allocate_at(128, 128, 0, 0)
    assert layout(allocator)[1:4] == [
        (64, 64, SYNCED, -1),
        (128, 128, LIVE, 0),
        (256, 64, UNSYNCED, 0),
    ]
    allocator.check_consistency()
    with pytest.raises(ValueError, match="multiple of 64"):
        allocator.allocate_at(1, 64, 0, 0)


def test_limits_and_accounts() -> None:
    allocator = _C.Allocator(4096)
    assert allocator.limit(3) is None
    allocator.set_limit(3, 256)
    assert allocator.allocate(200, 0, 3) == 0
    assert allocator.allocate(1, 0, 3) is None
    assert not allocator.allocate_at(1024, 1, 0, 3)
    assert allocator.allocate(1, 0, 4) == 256
    assert (allocator.held(3), allocator.held(4), allocator.held(99)) == (256, 64, 0)
    allocator.set_limit(3, 64)  # below what it holds: nothing more until it has shrunk
    assert allocator.allocate(1, 0, 3) is None
    allocator.free(0, 0)
    assert allocator.allocate(1, 0, 3) == 0
    allocator.set_limit(3, None)
    assert allocator.limit(3) is None
    assert (allocator.peak(3), allocator.peak(), allocator.extent()) == (256, 320, 320)
    allocator.reset_peaks()
    assert (allocator.peak(3), allocator.peak(), allocator.extent()) == (64, 128, 320)


def test_resize_moves_only_a_synced_tail() -> None:
    allocator = _C.Allocator(1024)
    offset = allocator.allocate(512, 0, 0)
    assert not allocator.resize(448)
    assert allocator.resize(512)
    assert allocator.allocate(64, 0, 0) is None
    assert allocator.resize(640)
    assert allocator.allocate(128, 0, 0) == 512
    assert allocator.resize(700)
    assert allocator.capacity() == 640
    allocator.free(512, 0)
    assert not allocator.resize(512)
    allocator.synchronize()
    assert allocator.resize(512)
    allocator.free(offset, 0)
    assert not allocator.resize(0)
    allocator.check_consistency()


def test_hundreds_of_equal_chunks_in_any_order() -> None:
    allocator = _C.Allocator(1 << 20)
    offsets = filled(allocator, [192, 64] * 500)[::2]
    for offset in sorted(offsets, key=lambda value: value * 2654435761 % 4093):
        allocator.free(offset, 0)
    allocator.check_consistency()
    assert filled(allocator, [192] * 500) == offsets


def test_a_copy_is_independent_and_does_not_log() -> None:
    allocator = _C.Allocator(1024)
    allocator.record(True)
    allocator.allocate(64, 0, 0)
    copy = allocator.copy()
    assert copy.allocate(64, 0, 0) == 64
    assert copy.take_log().size == 0
    assert allocator.take_log().size == 1
    assert allocator.allocate(64, 0, 0) == 64


def test_the_log_in_order() -> None:
    allocator = _C.Allocator(1024)
    early = allocator.allocate(64, 0, 7)
    allocator.record(True)
    allocator.synchronize()
    offset = allocator.allocate(100, 1, 5)
    allocator.use(offset, 0)
    allocator.free(offset, 1)
    kind = _C.EventKind
    assert [tuple(event) for event in allocator.take_log().tolist()] == [
        (early, 64, -1, 7, kind.ALLOC),
        (0, 0, -1, -1, kind.SYNC),
        (64, 128, 1, 5, kind.ALLOC),
        (64, 128, 0, 5, kind.USE),
        (64, 128, 1, 5, kind.FREE),
    ]
    assert allocator.take_log().dtype == _C.EVENT_DTYPE
    allocator.record(False)
    allocator.synchronize()
    assert allocator.take_log().size == 0


def test_find_a_live_chunk() -> None:
    allocator = _C.Allocator(1024)
    allocator.allocate(100, 1, 5)
    chunk = allocator.find(0)
    assert chunk is not None
    assert (chunk.bytes, chunk.job, chunk.users, chunk.state) == (128, 5, 2, LIVE)
    assert allocator.find(64) is None
    assert allocator.find(128) is None


def test_wrong_arguments_name_the_argument() -> None:
    allocator = _C.Allocator(1024)
    for offset in (0, 64, 1 << 40):
        with pytest.raises(_C.UnknownChunk, match=f"offset {offset}"):
            allocator.free(offset, 0)
        with pytest.raises(ValueError, match="no live chunk"):
            allocator.use(offset, 0)
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.allocate(0, 0, 0)
    with pytest.raises(ValueError, match="lane 2"):
        allocator.allocate(1, 2, 0)
    with pytest.raises(ValueError, match="job id"):
        allocator.allocate(1, 0, -1)
    with pytest.raises(ValueError, match="power of two"):
        _C.Allocator(1024, alignment=48)
    with pytest.raises(ValueError, match="lanes"):
        _C.Allocator(1024, lanes=65)
    with pytest.raises(ValueError, match="below the alignment"):
        _C.Allocator(32)
    assert allocator.allocate(2**64 - 1, 0, 0) is None


Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "free", "use", "sync"]),
        st.integers(1, 5000),
        st.integers(0, 1),
    ),
    max_size=80,
)


def placements(capacity: int, operations: list[Operation]) -> tuple[list[int | None], int]:
    """The offsets of all allocations, and the extent."""
    allocator = _C.Allocator(capacity)
    live: list[int] = []
    result = []
    for name, number, lane in operations:
        if name == "allocate":
            offset = allocator.allocate(number, lane, 0)
            result.append(offset)
            if offset is not None:
                live.append(offset)
        elif name == "sync":
            allocator.synchronize()
        elif live:
            offset = live[number % len(live)]
            if name == "free":
                live.remove(offset)
                allocator.free(offset, lane)
            else:
                allocator.use(offset, lane)
    allocator.check_consistency()
    return result, allocator.extent()


@given(OPERATIONS, st.integers(0, 100_000))
@settings(max_examples=150, deadline=None)
def test_placement_does_not_depend_on_a_capacity_that_fits(
    operations: list[Operation], spare: int
) -> None:
    wanted, extent = placements(1 << 40, operations)
    assert placements(max(extent, 64), operations)[0] == wanted
    assert placements(max(extent, 64) + spare, operations)[0] == wanted
