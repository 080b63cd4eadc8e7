"""The folder of a simulation: what users have named stays text, in the page and in the pictures."""

from __future__ import annotations

import json

import pytest

from tests.support.clusters import job
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.report.page import write_report

pytestmark = pytest.mark.virtual

HOSTILE = "</title><script>document.title='owned'</script>\x1b[31m\u202eb"


def test_a_hostile_name_of_a_trace_or_a_policy_stays_text(tmp_path):
    found = simulate([job(0), job(1, 10.0)], ClusterSpec.of(1, 1), "fifo")
    write_report(tmp_path, HOSTILE, 1, {"$\\frac{$": found, "<img src=x onerror=a()>": found})
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<img ") == 3  # the pictures
    assert "&lt;img src=x" in page
    assert json.loads((tmp_path / "results.json").read_text("utf-8"))["trace"] == HOSTILE
    for name in ("completion_times.png", "gpus_in_use.png", "queue_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
