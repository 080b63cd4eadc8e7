"""What users may name to be planned, and what they get."""

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import squares
from waterflow.study import job_specs
from waterflow.study.hardware import get_hardware
from waterflow.study.job_specs import job_of, study_jobs

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("kept_captures")]

CPU = get_hardware("cpu")
TINY = "espcn_small"


def make(batch):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wf.Job("mine", model, optimizer, squares, [torch.randn(batch, 4)])


@pytest.fixture
def captures(monkeypatch):
    """Names of the factories whose footprints are looked for."""
    seen = []
    kept = job_specs.footprint_model

    def counted(factory, *, name, alignment):
        seen.append(name)
        return kept(factory, name=name, alignment=alignment)

    monkeypatch.setattr(job_specs, "footprint_model", counted)
    return seen


def test_models_of_the_zoo_with_and_without_a_batch(captures):
    fixed, free = study_jobs([f"{TINY}:batch=5", TINY], CPU)
    assert (fixed.name, fixed.batch) == (f"{TINY}-1", 5)
    assert (free.name, free.batch) == (f"{TINY}-2", None)
    assert not fixed.is_fixed
    assert captures == [TINY], "named twice, captured once"
    assert free.sized_job(64).solo_bytes > free.sized_job(5).solo_bytes
    assert free.sized_job(5) is free.sized_job(5)
    assert fixed.sized_job(5).footprint.name == f"{TINY}-1"


def test_functions_from_a_batch_to_a_job(captures):
    (job,) = study_jobs([make], CPU)
    assert (job.name, job.batch, job.is_fixed) == ("make", None, False)
    held = job.sized_job(8).persistent_bytes
    assert held == 4 * 64  # weight and bias, each with its momentum
    assert captures == ["make"]


def test_jobs_as_they_are():
    given = make(8)
    given.weight = 3.0
    (job,) = study_jobs([given], CPU)
    assert job.is_fixed
    assert (job.name, job.batch) == ("mine", None)
    assert job.sized_job(None).flow_job.weight == 3.0


def test_times_are_estimated_unless_they_were_measured():
    given = make(8)
    (estimated,) = study_jobs([given], CPU)
    (measured,) = study_jobs([given], CPU, measure=True)
    assert estimated.sized_job().profile.source == "fake"
    assert measured.sized_job().profile.source == "measured"
    assert estimated.sized_job().profile.seconds > 0
    assert measured.sized_job().persistent_bytes == estimated.sized_job().persistent_bytes


def test_what_a_run_would_observe_first_is_measured_at_once(tmp_path):
    given = make(8)
    loss = given.loss

    def logs(model, batch):
        if batch.shape[0] > 8:
            (tmp_path / "large batches").write_text("one more")
        return loss(model, batch)

    given.loss = logs
    (measured,) = study_jobs([given], CPU, measure=True)
    assert measured.sized_job().profile.source == "measured"
    assert not list(tmp_path.iterdir())


FILE = """
import torch
import waterflow as wf
from torch import nn

def small(batch):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: model(x).square().mean()
    return wf.Job("of the file", model, optimizer, loss, [torch.randn(batch, 4)])

def jobs():
    return [small(4), small(8)]
"""


def test_factories_and_jobs_in_files(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(FILE)
    (made,) = study_jobs([f"{path}:small:batch=16"], CPU)
    assert (made.name, made.batch) == ("small", 16)
    both = study_jobs([str(path)], CPU)
    assert [job.name for job in both] == ["of the file-1", "of the file-2"]
    assert all(job.is_fixed for job in both)
    with pytest.raises(wf.JobError, match=r"name a factory, like .*models.py:make_job:batch=3"):
        study_jobs([f"{path}:batch=3"], CPU)


def test_a_job_that_runs_as_python_has_no_measured_profile():
    given = make(8)
    given.loss = lambda model, batch: model(batch).square().mean() * float(batch.sum() < 1e9)
    with pytest.raises((wf.JobError, wf.CaptureError)):
        study_jobs([given], CPU, measure=True)


def test_a_zoos_task_as_a_job():
    task = job_specs.TASKS[TINY]
    job = job_of(task, 3)
    assert (job.name, job.steps) == (TINY, 1)
    assert job_of(task, 3, "other").name == "other"


@pytest.mark.parametrize("given", [TINY, make(2), make])
def test_what_is_no_list_is_told(given):
    for ask in (wf.plan, wf.max_batch, wf.pair):
        with pytest.raises(wf.JobError, match=r"jobs must be a list, got .*: write \[...\] around"):
            ask(given, "1GiB")
