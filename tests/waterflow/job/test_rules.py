"""What a step does beside calling loss and optimizer: values that can be used, clipping, groups."""

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import rows
from tests.support.steps import job_of
from waterflow.common.errors import JobError
from waterflow.job.epochs import MicroBatches, begin_epoch
from waterflow.job.rules import StepRules

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": -1.0},
        {"clip_grad_norm": "1"},
        {"clip_grad_value": 0},
        {"clip_grad_value": True},
        {"accumulate": 0},
        {"accumulate": 2.0},
        {"autocast": torch.float32},
        {"autocast": "bfloat16"},
    ],
    ids=str,
)
def test_values_that_cannot_be_used_are_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(JobError, match=f"job 'a': {name} must be .*got {value!r}"):
        job_of(**options)


def test_gradients_are_clipped_by_norm_and_then_by_value():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    StepRules().clip([parameter])
    assert parameter.grad.tolist() == [3.0, 4.0]
    StepRules(clip_grad_norm=1.0, clip_grad_value=0.7).clip([parameter])
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.7])


@pytest.mark.parametrize(("batches", "sizes"), [(6, [3, 3]), (7, [3, 3, 1]), (2, [2])])
def test_a_step_takes_several_batches_and_the_last_what_is_left(batches, sizes):
    data = [rows(2) for _ in range(batches)]
    groups = list(begin_epoch(data, 0, 3))
    assert all(type(group) is MicroBatches for group in groups)
    assert [len(group) for group in groups] == sizes
    assert [batch for group in groups for batch in group] == data
    job = job_of(data=data, accumulate=3, epochs=2)
    assert job.length == len(sizes)
    assert job.total_steps == 2 * len(sizes)
    assert wf.run_eager(job).steps == 2 * len(sizes)


def test_data_with_no_batch_make_no_step():
    assert list(begin_epoch([], 0, 3)) == []


@pytest.mark.parametrize("capture", [True, False])
def test_a_callback_may_change_the_rules(capture):
    def trained(run):
        job = job_of(data=[rows(4)], steps=6, clip_grad_value=1.0, capture=capture)

        def on_step(result):
            if result.step == 3:
                job.clip_grad_value = 1e-3

        job.on_step = on_step
        return run(job), job.model.state_dict()

    eager, weights = trained(lambda job: wf.run_eager(job, threads=1))
    report, own = trained(lambda job: wf.run([job], memory="64MiB", threads=1)["a"])
    assert report.losses == eager.losses
    assert all(torch.equal(own[name], weights[name]) for name in weights)
