"""What a report says of lanes that ran no step."""

from __future__ import annotations

import pytest

from waterflow.common.errors import ReportError
from waterflow.report.idle import idle_from, idle_text
from waterflow.report.json_fields import Fields
from waterflow.report.report import Report

pytestmark = pytest.mark.virtual


def test_little_is_not_worth_a_word() -> None:
    assert idle_text({"data": 0.05, "memory": 0.04}, lane_seconds=1.0) == ""
    assert idle_text({}, lane_seconds=0.0) == ""


def test_what_took_longest_comes_first() -> None:
    text = idle_text({"memory": 0.25, "data": 2.0}, lane_seconds=4.0)
    assert text.startswith("lanes waited for data 2")
    assert text.index("data") < text.index("memory")


def test_it_comes_back_from_json_and_into_the_table() -> None:
    report = Report(idle_seconds={"python": 1.5, "jobs": 2.0}, lanes=2, seconds=2.0)
    assert Report.from_json(report.to_json()).idle_seconds == report.idle_seconds
    assert "lanes waited for jobs" in str(report.table().caption)


def test_reasons_that_nobody_knows_are_left_out_and_wrong_numbers_refused() -> None:
    assert idle_from(Fields({"idle_seconds": {"data": 1, "moon": 2}}, "")) == {"data": 1.0}
    with pytest.raises(ReportError, match=r"idle_seconds\.data"):
        idle_from(Fields({"idle_seconds": {"data": "long"}}, ""))
