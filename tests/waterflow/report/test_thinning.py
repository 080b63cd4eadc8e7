"""Thinning keeps what a picture is for: the extremes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.report.thinning import at_most, idle_stretches, stretches, thin_line
from waterflow.report.timeline import Spans

VALUES = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=1, max_size=400)


@settings(deadline=None)
@given(VALUES, st.integers(10, 60))
def test_a_line_keeps_its_extremes_ends_and_breaks(values, points):
    line = np.array(values)
    places, kept = thin_line(line, points)
    assert len(kept) <= max(2 * points, 12)
    np.testing.assert_array_equal(kept, line[places.astype(int) - 1])
    assert (np.diff(places) > 0).all()
    assert (places[0], places[-1]) == (1, len(line))
    assert np.isnan(kept).any() == np.isnan(line).any()
    if not np.isnan(line).all():
        assert np.nanmin(kept) == np.nanmin(line)
        assert np.nanmax(kept) == np.nanmax(line)


def test_sums_above_the_peak_are_scaled_and_counted():
    bands, scaled = at_most(np.array([[4, 1], [4, 1]]), 6)
    assert bands.tolist() == [[3, 1], [3, 1]]
    assert scaled == 1
    assert at_most(np.array([[4]]), 0)[1] == 0


def spans_of(rows):
    columns = list(zip(*rows, strict=True))
    return Spans(*columns, ["a", "b"])


def test_stretches_join_what_follows_at_once():
    rows = [(0, 0, 1, 0, 0.0, 1.0), (0, 0, 2, 0, 1.05, 2.0), (0, 1, 1, 0, 2.0, 3.0)]
    rows.append((1, 0, 3, 0, 0.0, 1.0))
    found, pause = stretches(spans_of(rows), 0.1)
    assert pause == 0.1
    assert found == [(0, 0, 0.0, 2.0, 1, 2), (0, 1, 2.0, 3.0, 1, 1), (1, 0, 0.0, 1.0, 3, 3)]


def test_very_many_stretches_are_few_and_the_long_one_stays():
    rows = [(0, at % 2, at, 0, at * 1e-3, at * 1e-3 + 1e-4) for at in range(20_000)]
    rows.append((0, 0, 5, 0, 30.0, 40.0))
    found, _ = stretches(spans_of(rows), 1e-6, most=500)
    assert 100 < len(found) <= 500
    assert max(one.stop - one.start for one in found) == 10.0


def test_idle_stretches_are_those_of_all_lanes():
    rows = [(0, 0, 1, 0, 0.0, 1.0), (1, 1, 1, 0, 0.5, 3.0), (0, 0, 2, 0, 5.0, 6.0)]
    assert idle_stretches(spans_of(rows), 1.0) == [(3.0, 5.0)]
    assert idle_stretches(spans_of(rows), 2.5) == []
