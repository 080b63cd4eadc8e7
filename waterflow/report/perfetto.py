"""The trace of a run in Chrome's trace event format, which https://ui.perfetto.dev opens.

One track per lane shows which node group ran when; one counter track per job shows the bytes it
held. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from waterflow.report.decisions import Decision
from waterflow.report.timeline import Spans, Timeline

_LANES = 1  # Perfetto keeps process 0 for the idle task
_MEMORY = 2
_MICRO = 1e6  # the format counts in microseconds


def trace_json(spans: Spans, timeline: Timeline, decisions: Sequence[Decision] = ()) -> str:
    """Return the trace as one JSON document."""
    events = [
        _metadata(_LANES, 0, "process_name", "waterflow lanes"),
        _metadata(_MEMORY, 0, "process_name", "waterflow memory"),
        *(
            _metadata(_LANES, int(lane) + 1, "thread_name", f"lane {lane}")
            for lane in np.unique(spans.lane)
        ),
        *_span_events(spans),
        *_counter_events(timeline),
        *(_instant(decision) for decision in decisions),
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _metadata(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _span_events(spans: Spans) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": _LANES,
            "tid": span.lane + 1,
            "name": f"{span.job} step {span.step} group {span.group}",
            "cat": "group",
            "ts": span.start * _MICRO,
            "dur": max(0.0, span.stop - span.start) * _MICRO,
            "args": {"job": span.job, "step": span.step, "group": span.group},
        }
        for span in spans
    ]


def _instant(decision: Decision) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "g",  # across all tracks
        "pid": _LANES,
        "tid": 0,
        "name": f"{decision.job or 'all'}: {decision.what}",
        "cat": "decision",
        "ts": decision.seconds * _MICRO,
    }


def _counter_events(timeline: Timeline) -> list[dict[str, Any]]:
    order = np.argsort(timeline.seconds, kind="stable")
    columns = (timeline.seconds[order] * _MICRO, timeline.job[order], timeline.bytes[order])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        {
            "ph": "C",
            "pid": _MEMORY,
            "tid": 0,
            "name": timeline.names[job],
            "ts": moment,
            "args": {"bytes": held},
        }
        for moment, job, held in rows
    ]
