"""What steps work on: the job's own tensors, or copies that share what the tensors share."""

import pytest
import torch
from torch import nn

from tests.support.steps import first_batch, job_of, steps_of
from waterflow.executor.profile.measured import Scratch
from waterflow.partitioner.graph.step_graph import Input

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def prepared(job):
    steps = steps_of(job)
    return steps, steps.preparer.prepare(first_batch(job)).specialization


@pytest.fixture
def scratch():
    steps = steps_of(job_of())
    made = Scratch(steps.device)
    yield made
    made.close()


def test_registers_are_the_hyperparameters_of_now():
    job = job_of()
    steps, found = prepared(job)
    assert set(steps.binder.registers(found.steady).values()) == {0.1, 0.9}
    job.optimizer.param_groups[0]["lr"] = 0.25
    assert set(steps.binder.registers(found.steady).values()) == {0.25, 0.9}


def test_twins_are_copies_of_what_the_job_has(scratch):
    job = job_of()
    steps, found = prepared(job)
    (twins,) = steps.binder.twins(scratch, [found.steady])
    weight = twins[Input("parameter", "one.weight")]
    assert torch.equal(weight, job.model.one.weight)
    assert weight.data_ptr() != job.model.one.weight.data_ptr()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)
        self.one.weight.requires_grad_(False)

    def forward(self, x):
        return self.two(self.one(x))


def test_only_what_is_written_has_to_be_copied(scratch):
    job = job_of(Frozen)
    steps, found = prepared(job)
    (twins,) = steps.binder.twins(scratch, [found.steady], written_only=True)
    frozen, trained = (twins[Input("parameter", f"{part}.weight")] for part in ("one", "two"))
    assert frozen.data_ptr() == job.model.one.weight.data_ptr()
    assert trained.data_ptr() != job.model.two.weight.data_ptr()


def test_steps_that_share_a_tensor_share_its_copy_each_has_its_own_otherwise(scratch):
    job = job_of()
    steps, found = prepared(job)
    first, steady = steps.binder.twins(scratch, found.steps)
    key = Input("parameter", "one.weight")
    assert first[key].data_ptr() == steady[key].data_ptr()
