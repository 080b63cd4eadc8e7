"""Reports: what they answer, how they are kept, and what happens to a damaged file."""

import io
import json
import math
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from waterflow.common.errors import ReportError, ReportWarning
from waterflow.report.report import JobReport, Report, Spans, Timeline

MIB = 2**20


def make_report(**changes):
    timeline = Timeline([0.0, 0.5, 1.0, 1.5], [0, 1, 0, 1], [3 * MIB, 2 * MIB, MIB, 0], ["a", "b"])
    spans = Spans([0, 1], [0, 1], [1, 1], [0, 2], [0.1, 0.2], [0.3, 0.4], ["a", "b"])
    jobs = [
        JobReport(
            name="a",
            state="finished",
            losses=[1.5, 0.5],
            steps=2,
            epochs=1,
            seed=7,
            solo_peak_bytes=3 * MIB,
            wall_seconds=0.5,
            peak_bytes=3 * MIB,
        ),
        JobReport(
            name="b",
            state="failed",
            error="boom",
            error_type="ValueError",
            losses=[math.nan, math.inf, -math.inf],
            captured="opaque step",
            notes=["its step runs eagerly"],
            solo_peak_bytes=4 * MIB,
            exception=ValueError("boom"),
        ),
    ]
    values = {
        "jobs": {job.name: job for job in jobs},
        "peak_bytes": 5 * MIB,
        "extent_bytes": 6 * MIB,
        "budget_bytes": 8 * MIB,
        "policy": "waterwave",
        "lanes": 2,
        "seconds": 1.5,
        "timeline": timeline,
        "spans": spans,
        "versions": {"torch": "2.13.0"},
        "schedules": ["lane 0: a.0 b.1"],
    }
    return Report(**(values | changes))


def test_jobs_by_name_and_in_order():
    report = make_report()
    assert report["a"].steps_per_second == 4.0
    assert [job.name for job in report] == ["a", "b"]
    assert "a" in report
    assert "c" not in report
    assert not report.ok
    assert JobReport(name="new").steps_per_second == 0.0


def test_a_wrong_name_is_answered_with_the_nearest():
    report = Report(jobs={name: JobReport(name=name) for name in ("lr-0.1", "lr-0.01", "wide")})
    with pytest.raises(KeyError, match=r"no job 'lr-0\.2'.*'lr-0\.1'"):
        report["lr-0.2"]
    with pytest.raises(KeyError, match="it has no jobs"):
        Report()["x"]


def test_side_by_side_is_known_only_if_every_peak_is():
    report = make_report()
    assert report.side_by_side_bytes == 7 * MIB
    report["a"].solo_peak_bytes = None
    assert report.side_by_side_bytes is None
    assert Report().side_by_side_bytes is None


def test_saves_its_files_and_loads_the_same(tmp_path):
    report = make_report()
    where = report.save(tmp_path / "deep" / "run")
    assert sorted(path.name for path in where.iterdir()) == [
        "memory.png",
        "report.html",
        "report.json",
        "trace.json",
    ]
    for again in (Report.load(where), Report.load(where / "report.json")):
        assert again.to_json() == report.to_json()
        assert again.timeline == report.timeline
        assert again.spans == report.spans
        assert math.isnan(again["b"].losses[0])
        assert again["b"].losses[1:] == [math.inf, -math.inf]
        assert again["b"].exception is None
    assert imread(where / "memory.png").std() > 0


def test_json_is_strict_and_names_what_diverged():
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(make_report(seconds=math.nan).to_json(), parse_constant=refuse)
    assert document["jobs"][1]["losses"] == ["nan", "inf", "-inf"]
    assert document["seconds"] == "nan"
    assert document["side_by_side_bytes"] == 7 * MIB


NAMES = st.text(max_size=8)
LOSSES = st.lists(st.floats(width=64), max_size=6)


@settings(max_examples=60, deadline=None)
@given(NAMES, LOSSES, st.text(max_size=20), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_any_job_survives_the_round_trip(name, losses, error, seed):
    job = JobReport(name=name, losses=losses, error=error, seed=seed, peak_bytes=np.int64(5))
    report = Report(jobs={name: job}, timeline=Timeline([0.25], [0], [2**62], [name]))
    again = Report.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    for kept, loss in zip(again[name].losses, losses, strict=True):
        assert struct.pack("d", kept) == struct.pack("d", loss) or kept != kept != loss
    assert again.timeline == report.timeline


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path):
    make_report().save(tmp_path)
    make_report(seconds=9.0).save(tmp_path)
    assert Report.load(tmp_path).seconds == 9.0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_failed_save_keeps_the_old_report(tmp_path, monkeypatch):
    make_report().save(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("waterflow.common.files.os.fsync", full)
    with pytest.raises(ReportError, match="No space left"):
        make_report(seconds=9.0).save(tmp_path)
    assert Report.load(tmp_path).seconds == 1.5
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_in_the_way_is_named(tmp_path):
    blocked = tmp_path / "taken"
    blocked.write_text("x")
    with pytest.raises(ReportError, match="taken"):
        make_report().save(blocked)


def change(**fields):
    return lambda document: json.dumps(document | fields)


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: "",
        lambda document: json.dumps(document)[:-20],
        lambda document: "[]",
        lambda document: "[" * 100_000,
        lambda document: json.dumps({"format": "something else"}),
        change(format_version=99),
        change(jobs=[1]),
        change(jobs={}),
        change(peak_bytes=True),
        change(peak_bytes="5"),
        change(seconds="soon"),
        change(seconds=10**400),
        change(versions={"torch": 2}),
        change(schedules=[1]),
        change(timeline={"names": ["a"], "seconds": [0.0], "job": [0], "bytes": []}),
        change(timeline={"names": ["a"], "seconds": [0.0], "job": [3], "bytes": [1]}),
        change(timeline={"names": ["a"], "seconds": [[0.0], 1], "job": [0], "bytes": [1]}),
        change(timeline={"names": ["a"], "seconds": [0.0], "job": [0], "bytes": [10**30]}),
        lambda document: json.dumps(document | {"jobs": document["jobs"][:1] * 2}),
        lambda document: json.dumps(
            document | {"jobs": [document["jobs"][0] | {"state": "asleep"}]}
        ),
        lambda document: json.dumps(document | {"jobs": [document["jobs"][0] | {"losses": ["x"]}]}),
    ],
)
def test_a_damaged_report_is_named(tmp_path, damage):
    document = json.loads(make_report().to_json())
    path = tmp_path / "report.json"
    path.write_text(damage(document))
    with pytest.raises(ReportError, match=r"report\.json"):
        Report.load(tmp_path)


def test_every_missing_field_is_named(tmp_path):
    document = json.loads(make_report().to_json())
    for key in document.keys() - {"side_by_side_bytes", "decisions"}:
        less = {name: value for name, value in document.items() if name != key}
        with pytest.raises(ReportError, match=f"{key} is missing"):
            Report.from_json(json.dumps(less))


def test_what_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ReportError, match=r"no report at .*report\.json"):
        Report.load(tmp_path)
    with pytest.raises(ReportError, match="nowhere"):
        Report.load(tmp_path / "nowhere")
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match=r"report\.json"):
        Report.load(tmp_path)


def test_the_table_shows_names_as_they_are():
    report = make_report()
    report.jobs["[bold]x[/]"] = JobReport(name="[bold]x[/]", notes=["[/nothing]"])
    console = Console(file=io.StringIO(), width=160)
    console.print(report.table())
    text = console.file.getvalue()
    assert "[bold]x[/]" in text
    assert "[/nothing]" in text
    assert "b: ValueError: boom" in text
    assert "5.0 MiB of 8.0 MiB" in text


def test_without_bokeh_there_is_no_page_and_one_warning(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("of another run")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.warns(ReportWarning, match="bokeh") as warned:
        make_report().save(tmp_path)
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["memory.png", "report.json", "trace.json"]
