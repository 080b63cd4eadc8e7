"""Means over epochs: of which steps, weighted and rounded how."""

import math

import numpy as np
import pytest

from waterflow.common.errors import ReportError
from waterflow.report.job_report import JobReport

pytestmark = pytest.mark.virtual


def report(losses, ends, **metrics):
    made = len(losses)
    return JobReport(
        name="a", losses=losses, metrics=metrics, steps=made, epochs=len(ends), epoch_ends=ends
    )


def test_a_mean_is_weighted_by_what_the_steps_tell():
    found = report([1.0, 4.0, 2.0], [2, 3], right=[0.5, 1.0, 0.25], samples=[3.0, 1.0, 2.0])
    assert found.epoch_means() == [
        {"loss": 2.5, "right": 0.75, "samples": 2.0},
        {"loss": 2.0, "right": 0.25, "samples": 2.0},
    ]
    assert found.epoch_means("samples") == [
        {"loss": 1.75, "right": 0.625},
        {"loss": 2.0, "right": 0.25},
    ]


def test_an_epoch_that_was_not_gone_through_comes_last():
    assert report([1.0, 3.0, 7.0], [2]).epoch_means() == [{"loss": 2.0}, {"loss": 7.0}]
    assert report([1.0, 3.0], []).epoch_means() == [{"loss": 2.0}]
    assert report([], []).epoch_means() == []


def test_sums_are_rounded_as_was_asked_for():
    values = [0.1, 0.2, 0.3, 1e8]
    total = np.float32(0)
    for value in values:
        total += np.float32(value)
    (exact,), (single,) = (
        report(values, [4]).epoch_means(precision=one) for one in ("float64", "float32")
    )
    assert exact == {"loss": sum(values) / 4}
    assert single == {"loss": float(total / np.float32(4))} != exact


def test_what_is_no_number_shows():
    found = report([1.0, math.inf, 1.0], [3], late=[math.nan, 2.0, 3.0])
    (means,) = found.epoch_means()
    assert math.isinf(means["loss"])
    assert math.isnan(means["late"])
    single = report([3.4e38, 3.4e38], [2])
    assert math.isinf(single.epoch_means(precision="float32")[0]["loss"])


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        (report([1.0], [1], a=[1.0]), {"weight": "b"}, r"'b' is no metric.*told 'loss', 'a'"),
        (report([1.0], [1]), {"precision": "half"}, "'float64' or 'float32', got 'half'"),
        (JobReport(name="a", losses=[1.0], epochs=1), {}, "older version"),
    ],
)
def test_wrong_input_is_told_clearly(made, arguments, message):
    with pytest.raises(ReportError, match=message):
        made.epoch_means(**arguments)
