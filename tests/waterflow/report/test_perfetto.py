import json

import pytest

from waterflow.report.perfetto import trace_json
from waterflow.report.timeline import Spans, Timeline

pytestmark = pytest.mark.virtual

SPANS = Spans([1, 0], [0, 1], [3, 4], [0, 2], [0.5, 1.0], [0.75, 0.5], ["a", "b"])
TIMELINE = Timeline([2.0, 0.5], [1, 0], [20, 10], ["a", "b"])


def events(kind, spans=SPANS, timeline=TIMELINE):
    document = json.loads(trace_json(spans, timeline))
    return [event for event in document["traceEvents"] if event["ph"] == kind]


def test_one_track_a_lane_with_what_ran_when():
    first, second = events("X")
    assert first["name"] == "a step 3 group 0"
    assert (first["ts"], first["dur"]) == (0.5e6, 0.25e6)
    assert first["args"] == {"job": "a", "step": 3, "group": 0}
    assert second["dur"] == 0  # a clock that went back makes no span of negative length
    tracks = {e["tid"]: e["args"]["name"] for e in events("M") if e["name"] == "thread_name"}
    assert tracks == {1: "lane 0", 2: "lane 1"}
    assert tracks[first["tid"]] == "lane 1"


def test_one_counter_a_job_in_the_order_of_time():
    assert [(e["name"], e["ts"], e["args"]["bytes"]) for e in events("C")] == [
        ("a", 0.5e6, 10),
        ("b", 2e6, 20),
    ]


def test_lanes_and_memory_are_processes_apart():
    names = {e["pid"]: e["args"]["name"] for e in events("M") if e["name"] == "process_name"}
    assert set(names.values()) == {"waterflow lanes", "waterflow memory"}
    assert {e["pid"] for e in events("X")} | {e["pid"] for e in events("C")} == set(names)
    assert 0 not in names  # which is the idle task's


def test_a_run_without_records_is_a_trace_all_the_same():
    assert events("X", Spans(), Timeline()) == events("C", Spans(), Timeline()) == []
