"""The demo: small, but with real jobs; and what it says when something is wrong."""

import json
import math

import pytest

from waterflow.cli import demo
from waterflow.cli.demo_jobs import Size, make_tasks
from waterflow.common.errors import BudgetError
from waterflow.report.job_report import JobReport
from waterflow.report.report import Report

SMALL = Size(rates=(0.01, 0.001), batch=352, epochs=1, width=16)


@pytest.mark.cpu
def test_the_demo_as_json(tmp_path, capsys):
    assert demo.main(json=True, out=tmp_path / "kept", size=SMALL) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    wanted = {"jobs", "peak_bytes", "budget_bytes", "side_by_side_bytes", "seconds"}
    assert wanted | {"sequential_seconds"} <= set(document)
    assert [job["steps"] for job in document["jobs"]] == [4] * 6
    assert all(job["equal_to_eager"] for job in document["jobs"])
    assert all(0 <= job["accuracy"] <= 1 for job in document["jobs"])
    assert 0 < document["peak_bytes"] <= document["budget_bytes"]
    assert document["budget_bytes"] < document["side_by_side_bytes"]
    assert document["seconds"] > 0 < document["sequential_seconds"]
    assert document["speedup"] > 0
    assert "one after another" in printed.err
    assert Report.load(tmp_path / "kept").peak_bytes == document["peak_bytes"]


@pytest.mark.cpu
def test_the_demo_as_text_under_a_budget_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert demo.main(memory="32MiB", out=tmp_path, size=SMALL) == 0
    printed = capsys.readouterr().out
    assert "budget 32.0 MiB" in printed
    assert "all 24 losses equal the eager loop's, bit for bit" in printed
    assert printed.count("%") >= 4


@pytest.mark.cpu
def test_a_budget_that_is_too_small(tmp_path):
    with pytest.raises(BudgetError, match="too small"):
        demo.main(memory="4KiB", out=tmp_path, size=SMALL)


@pytest.fixture
def outcome(tmp_path):
    def outcome(losses, eager_losses, *, state="finished", peak=5):
        def job(values, **more):
            return JobReport(name="a", losses=values, steps=len(values), **more)

        report = Report(
            jobs={"a": job(losses, state=state, solo_peak_bytes=8)},
            peak_bytes=peak,
            budget_bytes=6,
            seconds=1.0,
        )
        eager = [
            demo.Eager(threads=threads, jobs={"a": job(eager_losses, wall_seconds=seconds)})
            for threads, seconds in ((1, 2.0), (2, 3.0))
        ]
        return demo.Outcome(
            report=report, setup_seconds=0.5, accuracies={"a": 0.5}, eager=eager, out=tmp_path
        )

    return outcome


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("losses", "changes", "ok"),
    [
        ([1.0, 0.5], {}, True),
        ([1.0, math.nextafter(0.5, 1)], {}, False),
        ([1.0], {}, False),
        ([1.0, 0.5], {"state": "failed"}, False),
        ([1.0, 0.5], {"peak": 7}, False),
    ],
)
def test_what_is_not_as_promised_is_not_ok(outcome, losses, changes, ok):
    assert outcome(losses, [1.0, 0.5], **changes).ok is ok


@pytest.mark.virtual
def test_a_difference_is_named(outcome, monkeypatch, capsys, tmp_path):
    made = outcome([1.0], [2.0])
    monkeypatch.setattr(demo, "_measure", lambda *_: made)
    assert demo.main(out=tmp_path) == 1
    assert "DIFFERENT from the eager loop with 1 thread: a" in capsys.readouterr().out
    assert demo.main(json=True, out=tmp_path) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["equal_to_eager"] is False
    assert (document["sequential_seconds"], document["sequential_threads"]) == (2.0, 1)


@pytest.mark.virtual
def test_ctrl_c(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "_measure", lambda *_: None)
    assert demo.main(json=True, out=tmp_path) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "interrupted" in printed.err


def test_the_jobs_are_the_same_at_every_call():
    for one, other in zip(make_tasks(SMALL), make_tasks(SMALL), strict=True):
        assert one.job.name == other.job.name
        pairs = zip(one.job.model.parameters(), other.job.model.parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs)
