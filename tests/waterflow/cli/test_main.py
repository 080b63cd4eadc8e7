"""The list of commands, and those that only look."""

import json
import os
import re
import subprocess
import sys

from tests.support.command_line import call, refused
from waterflow.report.report import JobReport, Report, Timeline


def test_usage():
    result = call("--help")
    assert result.exit_code == 0
    for command in ("demo", "run", "compare", "plan", "max-batch", "pair", "report", "doctor"):
        assert re.search(rf"^\s*{command} ", result.stdout, re.MULTILINE)
    assert call("--version").stdout.strip()
    assert call("run").exit_code == 2
    assert call("nothing").exit_code == 2


def test_as_a_command_in_a_shell(tmp_path):
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "waterflow.cli.main", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("waterflow: no report at ")


def test_report_prints_and_draws_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timeline = Timeline([0.0, 1.0], [0, 0], [2**20, 0], ["a"])
    jobs = {"a": JobReport(name="a", state="finished")}
    Report(jobs=jobs, policy="flow", budget_bytes=8 * 2**20, timeline=timeline).save("kept")
    assert "flow on cpu" in call("report", tmp_path / "kept").stdout
    page = tmp_path / "kept" / "report.html"
    assert "report.html" in call("report", tmp_path / "kept").stderr
    page.unlink()
    assert call("report", tmp_path / "kept", "--html").exit_code == 0
    assert "</html>" in page.read_text("utf-8")
    document = json.loads(call("report", tmp_path / "kept", "--json").stdout)
    assert document["budget_bytes"] == 8 * 2**20
    for name in ("again.png", "again.SVG", "again.pdf"):
        assert call("report", tmp_path / "kept", "--out", tmp_path / name).exit_code == 0
        assert (tmp_path / name).stat().st_size > 1000
    assert ".png, .svg, .pdf" in refused(call("report", tmp_path / "kept", "--out", "a.bmp"))
    assert "no" in refused(call("report", tmp_path / "kept", "--out", tmp_path / "no" / "a.png"))
    assert "report.json" in refused(call("report", tmp_path))


def test_it_is_a_module_of_its_own(tmp_path):
    command = [sys.executable, "-m", "waterflow", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == call("--version").stdout
