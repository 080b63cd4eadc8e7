"""Jobs as users describe them: what is counted, where they are, what is refused."""

import pytest
import torch
from torch import nn, optim

import waterflow as wf
from tests.support.data import rows
from tests.support.steps import job_of
from waterflow.common.errors import JobError
from waterflow.job.job import META_ALLOWED, check_audit

pytestmark = pytest.mark.cpu


def test_one_epoch_unless_something_is_said():
    assert job_of().epochs == 1
    assert job_of(steps=3).epochs is None


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"epochs": 3}, 6),
        ({"steps": 5}, 5),
        ({"epochs": 3, "steps": 5}, 5),
        ({"epochs": 1, "steps": 5}, 2),
    ],
)
def test_total_steps(options, total):
    assert job_of(data=[rows(4), rows(4)], **options).total_steps == total


def test_data_without_a_length_have_no_total():
    batches = (rows(4) for _ in range(2))
    assert job_of(data=batches, epochs=1).total_steps is None


def test_a_model_without_memory_is_refused_unless_it_is_only_looked_at():
    def meta():
        return nn.Linear(4, 3, device="meta")

    with pytest.raises(JobError, match=r"job 'a': its model is on meta.*'cpu' or 'cuda'"):
        job_of(meta)
    token = META_ALLOWED.set(True)
    try:
        assert job_of(meta).device.type == "cpu"
    finally:
        META_ALLOWED.reset(token)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(JobError, match="ExponentialLR schedules another optimizer"):
        job_of(scheduler=optim.lr_scheduler.ExponentialLR(other, 0.9))


class OddLength(list):
    def __len__(self):
        raise ValueError("not yet")


def test_data_that_cannot_tell_their_length_have_none():
    assert job_of(data=OddLength([1]), epochs=2).total_steps is None


def test_an_optimizer_of_another_model_is_refused():
    other = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(JobError, match="holds none of its model's parameters"):
        job_of(optimizer=lambda parameters: other)


@pytest.mark.parametrize(
    "options",
    [{"epochs": 0}, {"steps": 1.5}, {"seed": 2**64}, {"weight": 0}, {"clip_grad_norm": 0.0}],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options):
    (name,) = options
    with pytest.raises(JobError, match=f"job 'a': {name} must be"):
        wf.Job(
            "a",
            model=(model := nn.Linear(1, 1)),
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, batch: model(batch).sum(),
            data=[torch.zeros(1, 1)],
            **options,
        )


def test_audits():
    check_audit("log")
    check_audit(None, optional=True)
    with pytest.raises(JobError, match="audit must be one of log, all, off, got None"):
        check_audit(None)


def test_stop_says_what_it_is():
    assert repr(wf.STOP) == "waterflow.STOP"
