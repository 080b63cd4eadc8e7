"""A report at a prompt and in a notebook; its errors."""

import io
import math
import warnings

import pytest
from rich.console import Console

import waterflow as wf
from waterflow.report.report import JobReport, Report

pytestmark = pytest.mark.virtual


def report_of(*jobs, **fields):
    return Report(jobs={job.name: job for job in jobs}, policy="flow", lanes=2, **fields)


def job(name="a", **fields):
    return JobReport(name=name, **{"state": "finished", "losses": [1.0, 0.5], "steps": 2, **fields})


def failed(name, error):
    kind = type(error).__name__
    return job(name, state="failed", error=str(error), error_type=kind, exception=error)


def test_a_prompt_shows_a_small_table():
    report = report_of(job("a"), failed("b", KeyError("label")))
    text = repr(report)
    assert len(text) < 600
    assert "a" in text
    assert "finished" in text
    assert "b: KeyError: 'label'" in text


def test_of_many_jobs_a_prompt_shows_both_ends():
    text = repr(report_of(*(job(f"job-{number}") for number in range(1000))))
    assert len(text) < 4000
    assert "job-0 " in text
    assert "job-999 " in text
    assert "... 980 more" in text


def test_a_notebook_shows_a_table_that_is_escaped():
    report = report_of(failed("<script>alert(1)</script>", ValueError("<img src=x>")))
    text = report._repr_html_()
    assert "<table>" in text
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_a_name_forges_no_line():
    report = report_of(job("a\nb: finished", notes=["one\ntwo"]), job("\x1b[2Jc", state="stopped"))
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table())
    for text in (console.file.getvalue(), repr(report), report._repr_html_()):
        assert "\x1b[2J" not in text
        assert r"a\nb: finished" in text
    assert "\n  two" in console.file.getvalue()


def test_one_error_is_raised_as_it_was():
    error = KeyError("label")
    with pytest.raises(KeyError) as caught:
        report_of(job("a"), failed("b", error)).raise_errors()
    assert caught.value is error
    assert error.__notes__ == ["job 'b' failed with this after 2 steps"]
    with pytest.raises(KeyError):
        report_of(failed("b", error)).raise_errors()
    assert len(error.__notes__) == 1


def test_several_errors_are_a_group():
    report = report_of(failed("a", KeyError("x")), failed("b", SystemExit(3)), job("c"))
    with pytest.raises(BaseExceptionGroup, match="2 of 3 jobs failed") as caught:
        report.raise_errors()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, SystemExit]
    with pytest.raises(ExceptionGroup):
        report_of(failed("a", KeyError("x")), failed("b", ValueError("y"))).raise_errors()


def test_no_error_is_none():
    report_of(job("a")).raise_errors()


def test_a_report_from_a_file_has_the_text():
    loaded = Report.from_json(report_of(failed("a", KeyError("x"))).to_json())
    with pytest.raises(wf.JobFailedError, match="job 'a' failed: KeyError: 'x'"):
        loaded.raise_errors()


@pytest.mark.parametrize(
    ("losses", "step", "rest"),
    [
        ([1.0, math.nan], 2, "the last one"),
        ([math.inf, math.nan, math.nan], 1, "as all after it were"),
        ([1.0, math.nan, 2.0, math.nan], 2, "as 1 of the 2 after it were"),
    ],
)
def test_losses_that_are_no_numbers(losses, step, rest):
    one = job(losses=losses)
    assert one.nonfinite_step == step
    assert f"the loss of step {step} was {losses[step - 1]}, {rest}" in one.loss_note
    assert job().loss_note is None


def test_a_report_is_not_replaced_without_a_word(tmp_path):
    first, second = report_of(job("a")), report_of(job("b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.save(tmp_path)
        second.save(tmp_path, overwrite=True)
    with pytest.raises(wf.ReportError, match="already holds a report"):
        first.save(tmp_path, overwrite=False)
    assert "b" in Report.load(tmp_path)
    with pytest.warns(wf.ReportWarning, match="is replaced") as caught:
        first.save(tmp_path)
    assert caught[0].filename == __file__
    assert "a" in Report.load(tmp_path)
