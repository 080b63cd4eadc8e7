"""The parts of a job's steps, put together."""

import pytest

from tests.support.steps import first_batch, job_of, steps_of
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.steps.job_steps import JobSteps

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


class WithDeviceInput(HostDevice):
    def device_input(self):
        return object()


def test_batches_are_brought_where_the_device_has_a_device_input_and_the_job_is_captured():
    assert steps_of(job_of()).prefetcher is None
    there = JobSteps(job_of(), WithDeviceInput(), JobRng(0), 1)
    assert there.prefetcher is not None
    assert JobSteps(job_of(capture=False), WithDeviceInput(), JobRng(0), 1).prefetcher is None


def test_the_ledger_is_there_before_any_batch():
    job = job_of()
    steps = steps_of(job)
    assert len(steps.persistent.tensors) == 4
    assert steps.persistent.final_bytes == steps.persistent.bytes > 0


def test_the_parts_know_each_other():
    job = job_of()
    steps = steps_of(job)
    found = steps.preparer.prepare(first_batch(job)).specialization
    assert steps.cache.steps() == found.steps
    assert steps.cache.step_for(found) is found.first
    steps.binder.bind(found.first)
    found.first.compiled.unbind()
    momentum = sum(tensor.nbytes for tensor in steps.persistent.tensors.values())
    assert steps.persistent.final_bytes >= steps.persistent.bytes + momentum
    assert {id(t) for t in steps.cache.written()} == {id(t) for t in job.model.parameters()}
