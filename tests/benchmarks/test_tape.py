"""The benchmark of tapes at a small size: what its rows say of each other."""

import json
import sys

import pytest

from benchmarks import tape

pytestmark = pytest.mark.cpu


def test_a_row_per_model_and_batch(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    options = ["--models", "cnn", "--batches", "1", "2", "--repeats", "1", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["tape", "--json", "--threads", "1", *options])
    tape.main()
    (line,) = capsys.readouterr().out.splitlines()
    rows = json.loads(line)["rows"]
    assert [(row["model"], row["batch"]) for row in rows] == [("cnn", 1), ("cnn", 2)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["eager_ms"] / row["tape_ms"], rel=0.01)
        assert row["operators"] > 20
