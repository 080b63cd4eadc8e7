"""The happens-before checker: what it accepts, what it rejects, and a million random events."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.programs import (
    CORE,
    PLAIN,
    Done,
    ended,
    linked,
    objects,
    objects_with_the_papers_keying,
)
from tests.support.tasks import Task
from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual

ALLOC, USE, FREE, SYNC = (int(_C.EventKind[name]) for name in ("ALLOC", "USE", "FREE", "SYNC"))
MARK, COPY, JOIN = (int(_C.EventKind[name]) for name in ("MARK", "COPY", "JOIN"))
OUT, IN = 64, 65  # copiers
Entry = tuple[int, int, int, int]  # kind, lane, offset, bytes
DRIVE = [*CORE, *(Path(__file__).with_name(name) for name in ("drive.cpp", "drive_main.cpp"))]
OURS = linked("drive", PLAIN, objects(DRIVE, PLAIN))
PAPER = linked("drive-paper", PLAIN, objects_with_the_papers_keying(DRIVE, PLAIN))


def complaints(*entries: Entry, lanes: int = 2) -> list[tuple[int, str]]:
    log = np.zeros(len(entries), dtype=_C.EVENT_DTYPE)
    for at, (kind, lane, offset, size) in enumerate(entries):
        log[at] = (offset, size, lane, 0, kind)
    return [(v.index, v.message) for v in _C.check_happens_before(log, lanes)]


def expect_one(found: list[tuple[int, str]], index: int, text: str) -> None:
    assert len(found) == 1
    assert found[0][0] == index
    assert text in found[0][1]


def test_a_lane_may_reuse_its_own_memory_at_once() -> None:
    assert complaints((ALLOC, 0, 0, 64), (FREE, 0, 0, 64), (ALLOC, 0, 0, 128)) == []


def test_another_lane_must_wait_for_a_sync() -> None:
    before = [(ALLOC, 0, 0, 64), (FREE, 0, 0, 64)]
    expect_one(complaints(*before, (ALLOC, 1, 0, 64)), 2, "lane 1 may overwrite what lane 0")
    assert complaints(*before, (SYNC, -1, 0, 0), (ALLOC, 1, 0, 64)) == []


def test_a_foreign_use_counts_although_the_free_is_on_the_own_lane() -> None:
    log = [(ALLOC, 0, 0, 64), (USE, 1, 0, 64), (FREE, 0, 0, 64), (ALLOC, 0, 0, 64)]
    expect_one(complaints(*log), 3, "lane 1 still uses since event 1")


#: Lane 0's block is copied out, its room given up, taken by lane 1 and filled from the tier.
SPILLED: list[Entry] = [
    (ALLOC, 0, 0, 64),
    (MARK, 0, 1, 0),
    (COPY, OUT, 0, 1),
    (JOIN, 0, OUT, 0),
    (FREE, 0, 0, 64),
    (SYNC, -1, 0, 0),
    (ALLOC, 1, 0, 64),
    (MARK, 1, 2, 0),
    (COPY, IN, 0, 2),
    (JOIN, 1, IN, 0),
    (USE, 1, 0, 64),
    (FREE, 1, 0, 64),
]


def test_copies_that_are_waited_for_both_ways() -> None:
    assert complaints(*SPILLED) == []


@pytest.mark.parametrize(
    ("missing", "index", "text"),
    [
        (1, 1, "copier 0 may copy what lane 0 has not done with"),
        (3, 3, "lane 0 frees what copier 0 may still copy"),
        (5, 5, "lane 1 may overwrite what lane 0 still uses"),
        (7, 7, "copier 1 may copy what lane 1 has not done with"),
        (9, 9, "lane 1 uses what copier 1 may still copy"),
    ],
)
def test_each_wait_of_a_copy_is_needed(missing: int, index: int, text: str) -> None:
    found = complaints(*(entry for at, entry in enumerate(SPILLED) if at != missing))
    assert found[0][0] == index
    assert text in found[0][1]


def test_a_sync_of_the_lanes_waits_for_no_copy() -> None:
    """Nor does a lane's wait for a copier tell another lane of the copy before the next sync."""
    copied = [(ALLOC, 0, 0, 64), (MARK, 0, 1, 0), (COPY, OUT, 0, 1)]
    expect_one(complaints(*copied, (SYNC, -1, 0, 0), (USE, 0, 0, 64)), 4, "may still copy")
    joined = [*copied, (JOIN, 0, OUT, 0)]
    expect_one(complaints(*joined, (USE, 1, 0, 64)), 4, "lane 1 uses what copier 0")
    assert complaints(*joined, (SYNC, -1, 0, 0), (USE, 1, 0, 64)) == []


def test_a_copy_of_no_block() -> None:
    expect_one(complaints((COPY, OUT, 0, 0)), 0, "no live allocation")
    expect_one(complaints((ALLOC, 0, 0, 64), (COPY, OUT, 32, 0)), 1, "no live allocation")
    with pytest.raises(ValueError, match="lane 0"):
        complaints((COPY, 0, 0, 0))


def test_a_part_of_an_earlier_range_counts() -> None:
    log = [(ALLOC, 0, 0, 256), (FREE, 0, 0, 256), (ALLOC, 0, 0, 64), (ALLOC, 1, 192, 64)]
    expect_one(complaints(*log), 3, "lane 1 may overwrite")
    log = [(ALLOC, 0, 0, 64), (ALLOC, 1, 64, 64), (FREE, 0, 0, 64), (FREE, 1, 64, 64)]
    expect_one(complaints(*log, (ALLOC, 0, 0, 128)), 4, "lane 1 still uses")


def test_no_lane_is_ordered_with_nothing_before_a_sync() -> None:
    log = [(ALLOC, -1, 0, 64), (FREE, -1, 0, 64)]
    expect_one(complaints(*log, (ALLOC, -1, 0, 64)), 2, "no lane may overwrite")
    expect_one(complaints(*log, (ALLOC, 0, 0, 64)), 2, "a thread that is no lane still uses")
    assert complaints(*log, (SYNC, -1, 0, 0), (ALLOC, -1, 0, 64)) == []


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([(ALLOC, 0, 0, 128), (ALLOC, 0, 64, 64)], "live"),
        ([(ALLOC, 0, 64, 64), (ALLOC, 0, 0, 256)], "live"),
        ([(ALLOC, 0, 0, 64), (FREE, 0, 0, 64), (USE, 0, 0, 64)], "after its free"),
        ([(ALLOC, 0, 0, 64), (FREE, 0, 0, 64), (FREE, 0, 0, 64)], "that is free"),
        ([(FREE, 0, 0, 64)], "never allocated"),
        ([(ALLOC, 0, 0, 64), (USE, 0, 64, 64)], "never allocated"),
        ([(ALLOC, 0, 0, 128), (FREE, 0, 64, 64)], "no whole allocation"),
    ],
)
def test_misuse(entries: list[Entry], text: str) -> None:
    expect_one(complaints(*entries), len(entries) - 1, text)


def test_a_log_with_more_lanes_than_told_is_refused() -> None:
    with pytest.raises(ValueError, match="lane 2"):
        complaints((ALLOC, 2, 0, 64))


@pytest.mark.parametrize("touch", ["use", "free"])
def test_a_lane_does_not_get_back_what_another_may_still_read(touch: str) -> None:
    allocator = _C.Allocator(1024)
    allocator.record(True)
    feature_map = allocator.allocate(64, 0, 0)
    allocator.synchronize()
    if touch == "use":
        allocator.use(feature_map, 1)
    allocator.free(feature_map, 0 if touch == "use" else 1)
    again = allocator.allocate(64, 0, 0)
    assert again != feature_map
    assert _C.check_happens_before(allocator.take_log(), 2) == []


def printed(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("drive", [ended(PAPER, "example", t) for t in ("use", "free")], ids=str)
def test_keying_by_the_allocating_lane_races(drive: Task[Done]) -> None:
    """Waterwave, section 4.2 b: lane 0 gets back what lane 1 may still read."""
    found = printed(drive.result())
    assert found["same"]
    assert "lane 0 may overwrite what lane 1 still uses" in found["first_violation"]


@pytest.mark.parametrize(
    "drive", [ended(OURS, "run", lanes, 1_000_000, lanes) for lanes in (1, 2, 3, 64)], ids=str
)
def test_a_million_random_operations(drive: Task[Done]) -> None:
    report = printed(drive.result())
    assert report["violations"] == 0, report["first_violation"]
    rare = ("planned", "refused", "uses", "frees", "syncs", "resizes", "consistency_checks")
    assert all(report[name] > 10 for name in rare), report


@pytest.mark.parametrize(
    "drive", [ended(PAPER, "run", seed, 20_000, 2) for seed in range(5)], ids=str
)
def test_random_runs_with_the_papers_keying_race(drive: Task[Done]) -> None:
    assert printed(drive.result())["violations"] > 0
