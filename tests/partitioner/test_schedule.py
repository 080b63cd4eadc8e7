import pytest

from waterflow.partitioner import GroupRef, NodeGroup, Schedule, planned_peak
from waterflow.partitioner.testing import step_profile

pytestmark = pytest.mark.virtual

A0, A1, B0, B1 = GroupRef(0, 0), GroupRef(0, 1), GroupRef(1, 0), GroupRef(1, 1)
UP, DOWN = NodeGroup(0, 1, 10, 10, 1.0), NodeGroup(1, 2, -10, 2, 3.0)


def schedule(pairs, peak_bytes=0):
    return Schedule("test", 2, ((UP, DOWN), (UP, DOWN)), pairs, peak_bytes)


def test_no_lane_counts_on_what_the_other_frees():
    groups = ((UP, DOWN), (UP, DOWN))
    assert planned_peak(groups, ((A0, None), (A1, B0), (B1, None)), [5, 6]) == 11 + 10 + 2 + 10
    assert planned_peak(groups, ((A0, None), (A1, None), (B0, None), (B1, None)), [5, 6]) == 23
    assert planned_peak(groups, (), [5, 6]) == 11


def test_time_and_overlap_by_hand():
    profiles = [step_profile([[10], [2, -2, -10]], seconds=[1, 3]) for _ in range(2)]
    staggered = schedule(((A0, None), (A1, B0), (None, B1)))
    assert staggered.predicted_seconds(profiles) == 1 + 3 + 3
    assert staggered.overlap(profiles) == 1 / 7
    side_by_side = schedule(((A0, B0), (A1, B1)))
    assert side_by_side.predicted_seconds(profiles) == 4
    assert side_by_side.overlap(profiles) == 1
    assert schedule(()).overlap(profiles) == 0


def test_compact_drops_empty_pairs_only():
    full = schedule(((A0, None), (A1, B0)))
    assert full.compact() is full
    assert schedule(((None, None), (A0, None), (None, None), (A1, B0))).compact() == full


def test_describe():
    text = schedule(((A0, None), (A1, B0), (None, B1)), peak_bytes=3 << 30).describe(["a", "b"])
    assert text == (
        "test: 2 jobs, 3 pairs, peak 3.00 GiB\n"
        "pair  lane 0       lane 1\n"
        "0     a 1/2 +10 B  -\n"
        "1     a 2/2 -10 B  b 1/2 +10 B\n"
        "2     -            b 2/2 -10 B"
    )
    assert "... 2 more pairs" in schedule(((A0, None),) * 3).describe(["a", "b"], max_rows=1)
