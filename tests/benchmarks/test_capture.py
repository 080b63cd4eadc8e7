"""The benchmark of captures: what its rows say of each other."""

import json
import sys

import pytest

from benchmarks import capture

pytestmark = pytest.mark.cpu


def test_captures_are_timed_and_traces_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    found = capture.capture("mlp")
    assert found["traces"] == 1
    assert 0 < found["seconds"] < 60


def test_each_way_has_its_part_of_the_cache(monkeypatch, capsys):
    def captured(name, folder):
        there = {part: (folder / part).is_dir() for part in ("profiles", "captures")}
        for part in there:
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / "file").write_text("some")
        return {"seconds": 8.0 / (1 + sum(there.values()) ** 2), "traces": 1 - there["captures"]}

    monkeypatch.setattr(capture, "captured", captured)
    monkeypatch.setattr(sys, "argv", ["capture", "--json", "--models", "mlp", "--repeats", "2"])
    capture.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["rows"] == [
        {
            "model": "mlp",
            "cold_seconds": 8.0,
            "fresh_seconds": 4.0,
            "disk_seconds": 1.6,
            "fresh_vs_disk": 2.5,
            "cold_vs_disk": 5.0,
            "kept_bytes": 4,
            "traced": 0,
        }
    ]
