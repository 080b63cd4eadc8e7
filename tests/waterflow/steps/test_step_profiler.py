"""Where profiles come from: the disk, or a run on copies that leaves the job as it is."""

import pytest
import torch

import waterflow as wf
from tests.support.jobs import adam
from tests.support.models import Noisy
from tests.support.steps import first_batch, job_of, steps_of
from waterflow.common import cache as cache_module
from waterflow.job.batch import flatten
from waterflow.steps import step_profiler
from waterflow.steps.step_profiler import StepProfiler

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """One that keeps what is quick to measure, too."""
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(step_profiler, "LEAST_SECONDS", 0.0)
    return tmp_path


def prepared(job):
    """The job's steps, and a profiler for them."""
    steps = steps_of(job)
    found = steps.preparer.prepare(first_batch(job)).specialization.steps
    profiler = StepProfiler(steps.device, steps.rng, 1, steps.binder)
    return steps, found, profiler


def test_what_was_measured_is_read_the_next_time(cache, monkeypatch):
    job = job_of(optimizer=adam)
    steps, found, profiler = prepared(job)
    measured = [step.memory.profile for step in found]
    assert len(list((cache / "profiles").iterdir())) == 2

    def refuse(function):
        raise AssertionError("measured again")

    monkeypatch.setattr(steps.device, "profile", refuse)
    profiler.profile(found, flatten(first_batch(job)))
    for step, profile in zip(found, measured, strict=True):
        assert step.memory.profile.events.tolist() == profile.events.tolist()


def test_what_is_quick_to_measure_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(step_profiler, "LEAST_SECONDS", 60.0)
    assert all(step.memory.profile for step in prepared(job_of(optimizer=adam))[1])
    assert not (cache / "profiles").exists()


def test_a_kept_profile_bears_the_name_of_the_job_that_reads_it(cache):
    first, second = job_of(optimizer=adam), job_of(optimizer=adam)
    second.name = "b"
    names = [{step.memory.profile.name for step in prepared(job)[1]} for job in (first, second)]
    assert len(list((cache / "profiles").iterdir())) == 2, "one pair of profiles for both"
    assert names == [{"a"}, {"b"}]


def test_where_one_is_missing_all_are_measured(cache):
    job = job_of(optimizer=adam)
    _, found, profiler = prepared(job)
    path = next(iter((cache / "profiles").iterdir()))
    path.unlink()
    profiler.profile(found, flatten(first_batch(job)))
    assert path.exists()


def test_measuring_moves_neither_weights_nor_streams(cache):
    job = job_of(Noisy, optimizer=adam)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    steps = steps_of(job)
    stream = steps.rng.host.get_state()
    assert steps.preparer.prepare(first_batch(job)).specialization is not None
    assert torch.equal(steps.rng.host.get_state(), stream)
    assert not job.optimizer.state
    for name, tensor in job.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_profile_of_another_step_is_measured_again(cache, monkeypatch):
    monkeypatch.setattr(cache_module, "_told", set())
    job = job_of(optimizer=adam)
    _, found, profiler = prepared(job)
    measured = [step.memory.profile.events.tolist() for step in found]
    one, other = (cache / "profiles").iterdir()
    other.write_bytes(one.read_bytes())
    with pytest.warns(wf.CacheWarning, match="nodes for a step of"):
        profiler.profile(found, flatten(first_batch(job)))
    assert [step.memory.profile.events.tolist() for step in found] == measured
    assert one.read_bytes() != other.read_bytes()
