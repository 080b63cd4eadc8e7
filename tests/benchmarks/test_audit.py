"""The benchmark of the account and of spot checks at small sizes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import audit

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows_of_a_small_model(monkeypatch, capsys):
    monkeypatch.setattr(audit, "MODELS", {"mlp": audit.MODELS["mlp"]})
    monkeypatch.setattr(audit, "STEPS", 7)
    monkeypatch.setattr(audit, "PAIR_STEPS", 6)
    monkeypatch.setattr(audit, "PAIR_WIDTH", 16)
    monkeypatch.setattr(sys, "argv", ["audit", "--json", "--repeats", "1"])
    audit.main()
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert row["model"] == "mlp"
    assert 0 < row["account_us"] < 1e3 * row["account_take_ms"]
    assert row["step_ms"] > 0
    assert row["check_ms"] > 0
    assert 2 <= row["checks_per_1000"] <= 11
    assert row["checks_share"] >= 0
    assert found["opaque_beside_captured"] > 0


def test_checks_that_cost_a_step_come_at_powers_of_two():
    assert audit.scheduled_checks(0.1, 0.15, graphs=2) == 10  # 1, 2, 4, ..., 512
    assert audit.scheduled_checks(0.1, 5.0, graphs=2) == 2
