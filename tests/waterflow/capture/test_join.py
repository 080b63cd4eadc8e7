"""What cannot be captured is said so, with the line and the ways out, and nothing is touched."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from tests.support.differences import assert_same_numbers, differences, remains, solo
from tests.support.jobs import adamw, build
from tests.support.models import Cnn, Mlp, Noisy
from tests.support.uncapturable import LOSSES, MODELS, ReplacesParameter, plain_checkpoint
from waterflow.capture.forward import trace_forward
from waterflow.common.errors import CaptureError
from waterflow.job.batch import flatten

pytestmark = pytest.mark.cpu


def capture(job):
    return trace_forward(job, flatten(next(iter(job.data))))


def snapshot(job):
    """All that a capture must leave alone."""
    tensors = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in remains(job).items()
    }
    identities = {name: id(value) for name, value in remains(job).items()}
    attributes = {
        (name, key): repr(value)
        for name, module in job.model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_")
    }
    gradients = [p.grad for p in job.model.parameters()]
    randoms = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return tensors, identities, attributes, gradients, randoms


def assert_untouched(before, job):
    after = snapshot(job)
    assert before[0].keys() == after[0].keys()
    assert all(
        torch.equal(value, after[0][name]) if isinstance(value, torch.Tensor) else True
        for name, value in before[0].items()
    )
    assert before[1:3] == after[1:3]
    assert all(one is other for one, other in zip(before[3], after[3], strict=True))
    assert before[4] == after[4]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_captured(name):
    model, reason, where = MODELS[name]
    job = build("job", model)
    before = snapshot(job)
    with pytest.raises(CaptureError) as caught:
        capture(job)
    text = str(caught.value)
    assert "job 'job' cannot be captured at " in text
    assert re.search(rf"\w+\.py:\d+ {where}", text), text
    assert reason in text
    assert "Ways out:" in text
    assert "capture=False" in text
    assert_untouched(before, job)


@pytest.mark.parametrize("name", [*MODELS, "replaces"])
def test_without_capture_the_numbers_are_those_of_the_loop(name):
    model = MODELS[name][0] if name in MODELS else ReplacesParameter
    jobs = []
    for run in (lambda job: wf.run_eager(job, threads=1), solo):
        random.seed(3)
        np.random.seed(3)
        job = build("job", model, capture=False)
        jobs += [job, run(job)]
    assert_same_numbers(*jobs)


def test_a_parameter_that_is_replaced():
    with pytest.raises(CaptureError, match="replaces its parameter 'weight'"):
        capture(build("job", ReplacesParameter))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_captured(name):
    make, reason, runs = LOSSES[name]
    job = build("job", Mlp, loss=make())
    before = snapshot(job)
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(job)
    assert re.search(r"uncapturable\.py:\d+ in ", str(caught.value))
    assert_untouched(before, job)
    if runs:
        eager, alone = (build("job", Mlp, loss=make(), capture=False) for _ in range(2))
        assert_same_numbers(eager, wf.run_eager(eager, threads=1), alone, solo(alone))


def test_a_run_reports_the_error_and_trains_the_others():
    jobs = [build("bad", MODELS["item"][0], capture=True), build("good", Mlp)]
    report = wf.run(jobs, memory="64MiB", threads=1)
    assert report.jobs["bad"].state == "failed"
    assert report.jobs["bad"].error_type == "CaptureError"
    assert "uncapturable.py" in report.jobs["bad"].error
    assert report.jobs["good"].state == "finished"


def test_parameters_that_are_used_around_the_model():
    def around():
        job = build("job", Mlp)
        given = job.model
        job.loss = lambda model, batch: cross_entropy(given, batch) + cross_entropy(model, batch)
        return job

    eager, job = around(), around()
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, report := solo(job))
    assert report.captured == "captured", report.notes


def test_parameters_of_another_model():
    job = build("job", Mlp)
    outside = job.model
    job.model = Mlp()
    job.loss = lambda model, batch: cross_entropy(outside, batch) + cross_entropy(model, batch)
    with pytest.raises(CaptureError, match="not reached through the model"):
        capture(job)
    assert all(p.grad is None for p in outside.parameters())


def test_checkpointing_without_dropout_is_captured():
    eager, job = build("job", plain_checkpoint), build("job", plain_checkpoint)
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, solo(job))


class Unknown:
    pass


@pytest.mark.parametrize(
    "thing", [Unknown(), torch.zeros(3).to_sparse(), {1, 2}, iter([1])], ids=lambda t: str(type(t))
)
def test_an_unknown_object_in_a_batch(thing):
    batches = [(x, y, thing) for x, y in pairs()]
    options = {"data": lambda: batches, "loss": lambda m, b: cross_entropy(m, b[:2])}
    report = solo(build("job", Mlp, capture=True, **options))
    assert report.error_type == "CaptureError"
    assert "a batch holds a" in report.error
    assert "capture=False" in report.error
    eager, job = (build("job", Mlp, **options) for _ in range(2))
    with pytest.warns(wf.OpaqueStepWarning, match="a batch holds a"):
        assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, report := solo(job))
    assert report.eager_steps == report.steps


def test_too_many_shapes(monkeypatch):
    monkeypatch.setattr("waterflow.steps.step_cache.MAX_SHAPES", 2)
    batches = [(torch.randn(size, 4), torch.zeros(size, dtype=torch.int64)) for size in (2, 3, 4)]
    for capture in ("auto", True):
        jobs = (build("job", Noisy, data=lambda: batches, capture=capture) for _ in range(2))
        eager, job = jobs
        assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, report := solo(job))
        assert report.captured == "captured"  # all but the batches of the third shape
        assert "2 different shapes" in report.notes[0]


@pytest.mark.parametrize("model", [Mlp, Noisy], ids=["plain", "noisy"])
def test_a_capture_touches_nothing(model):
    job = build("job", model, optimizer=adamw)
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(job)
    capture(job)
    assert_untouched(before, job)


def test_an_old_gradient_is_not_added():
    eager, job = (build("job", Mlp, optimizer=adamw) for _ in range(2))
    for parameter in job.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, solo(job))


def test_profiling_leaves_batch_statistics_alone():
    data = lambda: pairs("images")  # noqa: E731
    eager, job = (build("job", Cnn, data=data, steps=1, epochs=None) for _ in range(2))
    wf.run_eager(eager, threads=1)
    solo(job)
    assert differences(eager, job) == []


def test_a_teacher_beside_the_model_is_captured():
    """A second network that only the loss function knows, with statistics of its own."""

    def make():
        torch.manual_seed(2)
        teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)

        def loss(model, batch):
            x = batch[0]
            return cross_entropy(model, batch) + (model(x) - teacher(x)).square().mean()

        return build("job", Mlp, loss=loss), teacher

    (eager, one), (job, other) = make(), make()
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, solo(job))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
