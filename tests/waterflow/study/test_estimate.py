"""Estimates for steps whose memory can be worked out by hand."""

import dataclasses

import numpy as np
import pytest

from waterflow.partitioner.testing import step_profile
from waterflow.study.estimate import STUDIED, SizedJob, estimate, fits, fits_in_turn, timeline_of
from waterflow.study.footprint import Footprint

pytestmark = pytest.mark.virtual

UNIT = 64
HALF = 8
PEAK = HALF * UNIT
HELD = 4 * UNIT


def sized(name="a", first=None):
    """Holds four units; its step goes up by eight, one a node, and down again, a second a node."""
    nodes = [[UNIT]] * HALF + [[-UNIT]] * HALF
    steady = step_profile(nodes, seconds=[1.0] * len(nodes), name=name)
    zeros = np.zeros(len(nodes), dtype=np.int64)
    return SizedJob(
        Footprint(
            name=name,
            first=first,
            steady=steady,
            persistent_bytes=HELD,
            boundary=HALF,
            flops=zeros,
            moved_bytes=zeros,
        ),
        UNIT,
    )


PAIR = [sized("a"), sized("b")]
TIGHT = 2 * HELD + PEAK


def test_a_job_needs_what_it_holds_and_its_peak():
    job = sized()
    assert job.persistent_bytes == HELD
    assert job.solo_bytes == HELD + PEAK
    assert job.plan_job().boundary == HALF
    assert job.plan_job().profile.persistent_bytes == HELD


def test_what_the_first_step_leaves_is_counted_once():
    # It makes two of the four units that are held from then on, and peaks at twelve.
    first = step_profile([[2 * UNIT], [10 * UNIT], [-10 * UNIT]])
    job = sized(first=first)
    assert job.solo_bytes == HELD + 12 * UNIT - 2 * UNIT


def test_in_turn_one_peak_has_to_fit():
    assert fits_in_turn(PAIR, TIGHT)
    assert not fits_in_turn(PAIR, TIGHT - 1)


@pytest.mark.parametrize("policy", STUDIED)
def test_side_by_side_everything_overlaps(policy):
    found = estimate(PAIR, 2 * (HELD + PEAK), policy, UNIT)
    assert found.policy == policy
    assert found.peak_bytes <= 2 * (HELD + PEAK)
    assert found.serial_seconds == pytest.approx(4 * HALF, rel=1e-5)
    if policy != "temporal":
        assert found.overlap > 0.9
        assert found.speedup == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("policy", STUDIED)
def test_without_room_for_two_peaks(policy):
    found = estimate(PAIR, TIGHT, policy, UNIT)
    assert fits(PAIR, TIGHT, policy, UNIT) is (found is not None)
    if "waterwave" in policy:  # the published form has nothing to offer where nothing overlaps
        assert found is None
    else:
        assert found.peak_bytes == TIGHT
    if policy == "temporal":
        assert found.speedup == pytest.approx(1)
    if policy == "flow":  # what one step lets go of is the other's at once
        assert found.speedup > 1.5
    assert estimate(PAIR, TIGHT - 1, policy, UNIT) is None


def test_one_after_another_nothing_overlaps():
    found = estimate(PAIR, 1 << 20, "temporal", UNIT)
    assert found.overlap == 0
    assert found.speedup == pytest.approx(1, rel=1e-5)
    assert found.peak_bytes == TIGHT
    assert found.seconds == pytest.approx(4 * HALF, rel=1e-5)


def test_more_memory_is_never_slower_in_flow():
    seconds = [estimate(PAIR, TIGHT + k * UNIT, "flow", UNIT).seconds for k in range(9)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_the_timeline_is_what_each_job_holds():
    found = estimate(PAIR, 1 << 20, "temporal", UNIT)
    timeline = timeline_of(found, PAIR)
    assert timeline.names == ["a", "b"]
    assert timeline.peak_bytes() == TIGHT
    _, bands = timeline.bands()
    assert bands[:, 1:].min() == HELD  # from when each has its first sample
    assert bands[:, -1].tolist() == [HELD, HELD]
    assert bands.max(axis=1).tolist() == [HELD + PEAK] * 2


def test_no_time_is_no_speedup():
    found = estimate(PAIR, 1 << 20, "temporal", UNIT)
    assert dataclasses.replace(found, seconds=0.0).speedup == 1
