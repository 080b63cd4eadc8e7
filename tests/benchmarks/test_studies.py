"""The benchmarks of planning and of the policies at small sizes: their numbers are not looked at,
beyond what must hold for any."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import flow, max_batch, planner_scale

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_rows_of_the_largest_batches(monkeypatch, capsys):
    small = ("bert_base_small", "bert_base_small")
    monkeypatch.setattr(max_batch, "PAPER", {"bert_base_small": {"64MiB": (100, 50, 80)}})
    monkeypatch.setattr(max_batch, "MIXED", {})
    monkeypatch.setattr(max_batch, "MANY", {})
    monkeypatch.setattr(sys, "argv", ["max_batch", "--json", "--only", *small])
    max_batch.main()
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"model", "memory", "policy", "solo", "co", "ratio", "paper_ratio"} <= set(rows["flow"])
    assert rows["waterwave"]["paper_ratio"] == 0.8
    assert rows["flow"]["ratio"] >= 0.99 * rows["flow"]["bound"]


def test_the_cases_are_those_of_the_paper():
    cases = list(max_batch.cases())
    assert len(cases) == 6 * 2 + 3 + 2
    assert len({(case.label, case.memory) for case in cases}) == len(cases)


def test_planning_at_two_small_sizes(monkeypatch, capsys):
    monkeypatch.setattr(planner_scale, "FRAMES", (1, 2))
    monkeypatch.setattr(planner_scale, "BATCH", 2)
    monkeypatch.setattr(sys, "argv", ["planner_scale", "--json"])
    planner_scale.main()
    found = json.loads(capsys.readouterr().out)
    small, large = found["sizes"]
    assert small["nodes"] < large["nodes"]
    assert large["peak_rss_bytes"] < 2 << 30
    assert large["flow_seconds"] < 60
    assert found["flow_growth"] > 0


def test_policies_side_by_side(monkeypatch, capsys):
    monkeypatch.setattr(flow, "STEPS", 3)
    monkeypatch.setattr(flow, "LAYERS", 1)
    monkeypatch.setattr(flow, "TIGHTNESS", (1.25,))
    monkeypatch.setattr(sys, "argv", ["flow", "--json", "--repeats", "1"])
    flow.main()
    found = json.loads(capsys.readouterr().out)
    for policy in flow.POLICIES:
        assert found[f"{policy}_at_1.25_speedup"] > 0
    assert found["flow_at_1.25_simulated"] >= 1
