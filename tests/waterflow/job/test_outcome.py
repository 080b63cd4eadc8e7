"""What a loss returns beside its loss: metrics, recorded for each step."""

import math

import pytest
import torch
import torch.nn.functional as F

import waterflow as wf
from tests.support.data import rows
from tests.support.steps import job_of
from tests.support.tables import crossed
from waterflow.common.errors import JobError
from waterflow.job.epochs import begin_epoch
from waterflow.job.outcome import Outcome, StepTensors
from waterflow.report.step_loss import metrics_of
from waterflow.steps.eager_need import largest_batch

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ([1.0], "tuple of 2 values"),
        ({3: 1.0}, "a metric's name must be a text, got 3"),
        ({"a": "high"}, "the metric 'a' must be a number .*got a str"),
        ({"a": torch.zeros(3)}, r"the metric 'a' .*float32 and shape \(3,\)"),
        ({"a": {"b": 1.0}}, "the metric 'a' .*got a dict"),
        ({"a": torch.zeros((), dtype=torch.complex64)}, "the metric 'a' .*complex64"),
    ],
    ids=str,
)
def test_what_is_no_dict_of_numbers_is_refused(metrics, problem):
    with pytest.raises(JobError, match=f"job 'a': .*{problem}"):
        Outcome.of("a", (torch.zeros(()), metrics))


@pytest.mark.parametrize("capture", ["auto", False])
def test_a_job_with_bad_metrics_fails_with_that(capture):
    def loss(model, batch):
        return model(batch[0]).sum(), {"shape": batch[0].shape}

    report = wf.run([job_of(loss=loss, capture=capture)], memory="64MiB")["a"]
    assert report.state == "failed"
    assert "the metric 'shape' must be a number" in report.error


def test_a_step_without_metrics_has_a_plain_number():
    assert type(StepTensors(torch.tensor(1.5), [{}]).read()) is float


def test_a_metric_is_the_mean_over_the_batches_that_tell_it():
    told = [{"a": torch.tensor([1.0]), "b": 2}, {"a": 4.0}, {"a": torch.tensor(1)}]
    loss = StepTensors(torch.tensor(0.5), told).read()
    assert loss == 0.5
    assert metrics_of(loss) == {"a": 2.0, "b": 2.0}


def loss_with_metrics(model, batch):
    made = model(batch[0])
    right = (made.argmax(1) == batch[1]).double().mean()
    return F.cross_entropy(made, batch[1]), {"right": right, "top": made.max(), "rows": 4}


@pytest.mark.parametrize(
    ("capture", "policy"), crossed([True, False], ["flow", "temporal", "waterwave"])
)
def test_metrics_are_recorded_for_each_step(policy, capture, tmp_path):
    def job(**options):
        data = [rows(4), rows(4)]
        return job_of(loss=loss_with_metrics, data=data, epochs=40, **options)

    eager = wf.run_eager(job(), threads=1)
    report = wf.run([job(capture=capture)], memory="64MiB", policy=policy, threads=1)
    assert report["a"].metrics == eager.metrics
    assert report["a"].losses == eager.losses
    assert [len(values) for values in report["a"].metrics.values()] == [80, 80, 80]
    report.save(tmp_path / "run")
    assert wf.Report.load(tmp_path / "run")["a"].metrics == eager.metrics


def test_callbacks_are_told_the_metrics():
    heard = []
    job = job_of(loss=loss_with_metrics, steps=3, on_step=lambda r: heard.append(r.metrics))
    report = wf.run([job], memory="64MiB")["a"]
    assert [each["right"] for each in heard] == report.metrics["right"]


def test_steps_that_tell_nothing_have_no_number():
    calls = []

    def loss(model, batch):
        calls.append(None)
        value = model(batch[0]).sum()
        return value if len(calls) % 2 else (value, {"even": 1.0})

    report = wf.run_eager(job_of(loss=loss, steps=4))
    assert [math.isnan(value) for value in report.metrics["even"]] == [True, False, True, False]


@pytest.mark.parametrize("rules", [{}, {"accumulate": 2}, {"autocast": torch.bfloat16}], ids=str)
def test_a_bug_beside_metrics_is_the_users_own(rules):
    def loss(model, batch):
        value, told = loss_with_metrics(model, batch)
        return value + model(batch[0][:, :3]).sum(), told

    data = [rows(4), rows(4)]
    report = wf.run([job_of(loss=loss, capture=True, data=data, **rules)], memory="64MiB")["a"]
    assert report.state == "failed"
    assert "shapes cannot be multiplied" in report.error


def test_the_largest_step_of_several_batches_is_found():
    data = [rows(4), rows(4), rows(8), rows(8), rows(64)]
    job = job_of(data=data, accumulate=2)
    groups = list(begin_epoch(data, 0, 2))
    assert largest_batch(job, groups[0]) == groups[2]
    assert largest_batch(job_of(data=data[:4], accumulate=2), groups[0]) == groups[1]
