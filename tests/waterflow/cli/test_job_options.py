"""`waterflow run --priority JOB=guaranteed` and its like: what they give jobs, and wrong ones."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import call, refused
from tests.waterflow.cli.test_training import REAL_JOBS

pytestmark = pytest.mark.cpu


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "jobs.py"
    path.write_text(REAL_JOBS.replace("print", "str"))  # nothing of its own on stdout
    return path


def test_jobs_have_what_was_given(file, tmp_path, monkeypatch):
    import waterflow

    given = []
    run = waterflow.run

    def spy(jobs, *arguments, **options):
        given.extend((job.name, job.priority, job.weight, job.memory_limit) for job in jobs)
        return run(jobs, *arguments, **options)

    monkeypatch.setattr(waterflow, "run", spy)
    options = ["--priority", "a=guaranteed", "--priority", "b=opportunistic", "--weight", "b=2"]
    options += ["--memory-limit", "a=1MiB", "--out", tmp_path / "out", "--json"]
    result = call("run", file, *options)
    assert result.exit_code == 0, result.output
    assert given == [("a", "guaranteed", 1.0, 1 << 20), ("b", "opportunistic", 2.0, None)]
    assert [job["state"] for job in json.loads(result.stdout)["jobs"]] == ["finished"] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--priority", "aa=guaranteed"],
            "--priority: there is no job 'aa' in the file; nearest: 'a'",
        ),
        (["--weight", "zz=2"], "there is no job 'zz' in the file; nearest: 'a', 'b'"),
        (["--priority", "a=first"], "--priority a=first: priority must be one of 'guaranteed'"),
        (["--priority", "guaranteed"], "expected JOB=VALUE, such as --priority prod=guaranteed"),
        (["--weight", "a=heavy"], "--weight a=heavy: 'heavy' is no number"),
        (["--weight", "a=-1"], "weight must be a number above 0, got -1.0"),
        (["--memory-limit", "a=lots"], "--memory-limit a=lots: "),
        (["--weight", "a=1", "--weight", "a=2"], "job 'a' has a value already"),
        (
            ["--policy", "waterwave", "--priority", "a=guaranteed"],
            "job 'a': priority='guaranteed' is for policies under which lanes have a pace of their "
            "own, 'waterwave' runs rounds: use policy='flow', or priority='normal'",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(options, said, file, tmp_path):
    assert said in refused(call("run", file, *options, "--json", "--out", tmp_path / "out"))


def test_a_limit_under_what_an_operator_works_on_ends_that_job_alone(file, tmp_path):
    result = call("run", file, "--memory-limit", "a=64", "--json", "--out", tmp_path / "out")
    assert result.exit_code == 1
    one, other = json.loads(result.stdout)["jobs"]
    assert "job 'a': its step cannot be planned into 64 bytes (64 B), even by" in one["error"]
    assert "Give it that much or more, or use a smaller batch" in one["error"]
    assert other["state"] == "finished"
