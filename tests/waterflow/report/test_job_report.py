import dataclasses
import json
import math
from typing import get_args

import pytest

from waterflow.common.errors import ReportError
from waterflow.report.job_report import JobReport, State
from waterflow.report.json_fields import Fields

pytestmark = pytest.mark.virtual

REPORT = JobReport(
    name="a",
    state="failed",
    error="boom",
    error_type="ValueError",
    losses=[0.5, math.inf],
    steps=2,
    epochs=1,
    epoch_ends=[2],
    solo_peak_bytes=9,
    persistent_bytes=4,
    peak_bytes=8,
    wall_seconds=0.5,
    captured="opaque step",
    notes=["why"],
    checks=1,
    eager_steps=2,
    recaptures=3,
    capture_seconds=0.25,
    capture_shared_with="b",
    seed=7,
    exception=ValueError("boom"),
)


def test_all_but_the_live_error_survives_json():
    text = json.dumps(REPORT.to_dict(), allow_nan=False)
    back = JobReport.from_fields(Fields(json.loads(text), ""))
    assert back == REPORT  # the exception does not count
    assert back.exception is None


def test_every_field_is_kept():
    kept = set(REPORT.to_dict()) - {"steps_per_second"}
    assert kept == {field.name for field in dataclasses.fields(JobReport)} - {"exception"}


def test_a_state_that_there_is_not_is_refused():
    document = REPORT.to_dict() | {"state": "sleeping"}
    with pytest.raises(ReportError, match=r"expected one of queued, running, .*not 'sleeping'"):
        JobReport.from_fields(Fields(document, ""))


@pytest.mark.parametrize("state", get_args(State))
def test_only_errors_are_not_ok(state):
    assert JobReport(name="a", state=state).ok is (state not in ("failed", "out_of_memory"))


def test_the_rate_is_of_the_jobs_own_time():
    assert REPORT.steps_per_second == 4.0
    assert JobReport(name="new").steps_per_second == 0.0
