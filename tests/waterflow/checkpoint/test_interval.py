"""How often: what people write, and what they must not."""

import pytest

import waterflow as wf
from waterflow.checkpoint.interval import Interval

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (90, Interval(seconds=90)),
        (0.5, Interval(seconds=0.5)),
        ("90", Interval(seconds=90)),
        ("30s", Interval(seconds=30)),
        ("5min", Interval(seconds=300)),
        (" 1.5 Hours ", Interval(seconds=5400)),
        ("100 steps", Interval(steps=100)),
        ("1 step", Interval(steps=1)),
    ],
)
def test_intervals(value, interval):
    assert Interval.parse(value) == interval


@pytest.mark.parametrize(
    "value", [0, -1, float("inf"), float("nan"), True, None, "", "steps", "0 steps", "1.5 steps"]
)
def test_others_are_refused_by_value(value):
    with pytest.raises(wf.JobError, match="checkpoint_every cannot be"):
        Interval.parse(value)


@pytest.mark.parametrize("value", ["5 minuten", "-3s", "1e3", "5 min 3 s"])
def test_other_texts_are_refused(value):
    with pytest.raises(wf.JobError, match="5min"):
        Interval.parse(value)
