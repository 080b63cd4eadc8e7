"""Decisions of a run: told in its report, its trace and its table."""

from __future__ import annotations

import json

import pytest

import waterflow as wf
from tests.waterflow.engine.test_suspension import Stops, make_job
from waterflow.common.errors import ReportError
from waterflow.report.decisions import Decision
from waterflow.report.report import Report

pytestmark = pytest.mark.cpu


def test_a_run_tells_what_was_decided(tmp_path):
    stops = Stops(3)
    with wf.Engine("64MiB", threads=1) as engine:
        handle = engine.submit(make_job("a", 1, on_step=stops))
        with stops.at(3):
            handle.suspend()
        assert handle.suspend(300)
        engine.resize("32MiB")
        handle.set_weight(2)
        handle.resume()
    report = engine.report()
    told = [(job, what) for _, job, what, _ in report.decisions]
    assert told == [
        ("a", "rests, its memory is the others'"),
        ("", "the budget is 32.0 MiB"),
        ("a", "normal, weight 2"),
        ("a", "goes on"),
    ]
    assert [one.kind for one in report.decisions] == ["waited", "other", "other", "waited"]
    moments = [decision.seconds for decision in report.decisions]
    assert moments == sorted(moments)
    assert Report.load(report.save(tmp_path)).decisions == report.decisions
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    instants = [event["name"] for event in trace if event["ph"] == "i"]
    assert instants == [f"{job or 'all'}: {what}" for job, what in told]


def test_reports_from_before_there_were_decisions_are_read():
    document = json.loads(Report().to_json())
    del document["decisions"]
    assert Report.from_json(json.dumps(document)).decisions == []


def test_decisions_from_before_they_had_kinds_are_read():
    document = json.loads(Report(decisions=[Decision(1.0, "a", "b", "waited")]).to_json())
    document["decisions"][0].pop()
    assert Report.from_json(json.dumps(document)).decisions == [Decision(1.0, "a", "b")]


@pytest.mark.parametrize("bad", [1, [1, 2], [1, "a", 3], ["x", "a", "b"], [1, "a", "b", "?"]])
def test_what_is_no_decision(bad):
    document = json.loads(Report(decisions=[Decision(1.0, "a", "b")]).to_json())
    document["decisions"] = [bad]
    with pytest.raises(ReportError):
        Report.from_json(json.dumps(document))
