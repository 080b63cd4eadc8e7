"""A user's file of jobs: how it is run, and what its errors say."""

import sys
import textwrap

import pytest

from waterflow.common.errors import JobError
from waterflow.job.job_file import load_job_file, load_job_function

pytestmark = pytest.mark.cpu

JOB = """
import torch
import waterflow as wf

def make(name="a"):
    model = torch.nn.Linear(2, 1)
    return wf.Job(
        name, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda m, b: m(b).sum(), data=[torch.zeros(1, 2)],
    )
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="jobs.py"):
        path = tmp_path / name
        path.write_text(JOB + textwrap.dedent(text))
        return path

    return write


def line_of(path, text):
    return 1 + next(i for i, line in enumerate(path.read_text().splitlines()) if text in line)


def test_jobs_are_fresh_each_time(write):
    loaded = load_job_file(write("MEMORY = '1GB'\ndef jobs():\n    return [make(), make('b')]"))
    one, other = loaded.make_jobs(), loaded.make_jobs()
    assert [job.name for job in one] == ["a", "b"]
    assert one[0].model is not other[0].model
    assert loaded.memory == "1GB"


def test_a_file_finds_its_neighbours_and_replaces_no_module(write):
    write("value = 3", "neighbour_of_jobs.py")
    path = write("import neighbour_of_jobs\ndef jobs():\n    return [make()]", "torch.py")
    torch = sys.modules["torch"]
    assert load_job_file(path).memory is None
    assert sys.modules["torch"] is torch


def test_what_is_no_file_is_said(tmp_path):
    with pytest.raises(JobError, match="does not exist: give a Python file with a function jobs"):
        load_job_file(tmp_path / "none.py")
    with pytest.raises(JobError, match="is a folder"):
        load_job_file(tmp_path)
    with pytest.raises(JobError, match=r"a function make\(batch\)"):
        load_job_function(tmp_path / "none.py", "make")


def test_an_error_names_the_line(write):
    path = write("def jobs():\n    return [make(1 / 0)]")
    with pytest.raises(JobError) as caught:
        load_job_file(path).make_jobs()
    line = line_of(path, "1 / 0")
    assert str(caught.value) == f"{path}, line {line}: ZeroDivisionError: division by zero"
    path = write("def jobs(:\n    pass")
    with pytest.raises(JobError, match=f"line {line_of(path, 'jobs(:')}: SyntaxError"):
        load_job_file(path)


def test_a_file_that_exits_is_an_error_too(write):
    with pytest.raises(JobError, match="SystemExit: enough"):
        load_job_file(write("raise SystemExit('enough')"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("'a'", "must return a list of wf.Job, not str"),
        ("make()", "must return a list of wf.Job, not Job"),
        ("[]", "returned no job"),
        ("[make(), 3]", r"jobs\(\)\[1\] is not a wf.Job but int"),
    ],
)
def test_what_is_no_list_of_jobs_is_refused(write, returned, message):
    loaded = load_job_file(write(f"def jobs():\n    return {returned}"))
    with pytest.raises(JobError, match=message):
        loaded.make_jobs()


def test_without_the_function_there_is_nothing_to_load(write):
    with pytest.raises(JobError, match=r"has no function jobs\(\)"):
        load_job_file(write("jobs = 3"))
    with pytest.raises(JobError, match=r"no function sized\(batch\).*; it has make$"):
        load_job_function(write(""), "sized")


def test_a_function_of_the_batch_size(write):
    path = write("def sized(batch):\n    return make(str(batch)) if batch else batch")
    sized = load_job_function(path, "sized")
    assert sized(4).name == "4"
    with pytest.raises(JobError, match=r"sized\(0\) returned no wf.Job but int"):
        sized(0)


def test_a_function_that_takes_no_batch_size_is_told_what_it_should_be(write):
    path = write("def jobs(): return []\ndef keyworded(*, batch): return None")
    for name in ("jobs", "keyworded"):
        with pytest.raises(JobError, match=rf"let it be {name}\(batch\).*stands for what"):
            load_job_function(path, name)
