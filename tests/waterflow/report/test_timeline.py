"""Memory and node groups over time, as columns."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterflow.common.errors import ReportError
from waterflow.report.timeline import Span, Spans, Timeline


def test_bands_hold_each_job_until_its_next_sample():
    timeline = Timeline([2.0, 0.0, 1.0, 1.0], [0, 0, 1, 0], [0, 10, 5, 20], ["a", "b", "idle"])
    seconds, bands = timeline.bands()
    assert seconds.tolist() == [0.0, 1.0, 1.0, 2.0]
    assert bands.tolist() == [[10, 10, 20, 0], [0, 5, 5, 5], [0, 0, 0, 0]]
    assert timeline.peak_bytes() == 25
    assert Timeline().peak_bytes() == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(0, 2**40))))
def test_bands_agree_with_a_plain_loop(samples):
    columns = list(zip(*samples, strict=True)) or [(), (), ()]
    seconds, bands = Timeline(*columns, names=["a", "b", "c"]).bands()
    held = [0, 0, 0]
    ordered = sorted(samples, key=lambda sample: sample[0])
    for index, (moment, job, size) in enumerate(ordered):
        held[job] = size
        assert seconds[index] == moment
        assert bands[:, index].tolist() == held


@pytest.mark.parametrize(
    "columns",
    [
        ([0.0], [0], [1, 2]),
        ([0.0], [2], [1]),
        ([0.0], [-1], [1]),
        ([0.0], [0], [1.5]),
        ([math.nan], [0], [1]),
        ([0.0], [0], [2**70]),
        ([[0.0]], [[0]], [[1]]),
        (["x"], [0], [1]),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns):
    with pytest.raises(ReportError):
        Timeline(*columns, names=["a", "b"])


def test_spans_iterate_by_name():
    spans = Spans([0, 1], [0, 1], [1, 1], [0, 2], [0.1, 0.2], [0.3, 0.4], ["a", "b"])
    assert list(spans)[1] == Span(1, "b", 1, 2, 0.2, 0.4)
    with pytest.raises(ReportError):
        Spans([0], [1], [0], [0], [0.0], [1.0], names=["only"])


def test_equal_columns_are_equal_records():
    columns = ([0.0, 1.0], [0, 1], [5, 6], ["a", "b"])
    assert Timeline(*columns) == Timeline(*map(np.array, columns[:3]), ["a", "b"])
    assert Timeline(*columns) != Timeline(*columns[:3], ["a", "c"])
    assert Timeline(*columns) != Timeline([0.0, 1.0], [0, 1], [5, 7], ["a", "b"])
    assert Spans() == Spans()
    assert Spans() != Timeline()
    assert (len(Timeline(*columns)), len(Spans())) == (2, 0)
    assert repr(Timeline(*columns)) == "Timeline(2 samples of 2 jobs)"
