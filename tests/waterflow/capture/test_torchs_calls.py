"""What every step calls of torch's, beside the job's own Python, is watched as that is."""

from __future__ import annotations

import pytest
import torch

import waterflow as wf
from tests.support.steps import job_of
from waterflow.capture.torchs_calls import clips_by_others, has_own_zero_grad, watch_calls

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def nothing(*_, **__):
    return torch.zeros(())


def test_whose_functions_they_are(monkeypatch):
    job = job_of(clip_grad_norm=1.0)
    before = watch_calls(job)
    assert before.holds()
    assert not has_own_zero_grad(job.optimizer)
    assert not clips_by_others(job)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", nothing)
        assert clips_by_others(job)
        assert not before.holds()
        assert not clips_by_others(job_of())
    assert before.holds()
    for holder in (job.optimizer, type(job.optimizer), torch.optim.Optimizer):
        with monkeypatch.context() as patched:
            patched.setattr(holder, "zero_grad", nothing, raising=False)
            assert has_own_zero_grad(job.optimizer)
            assert not before.holds()


@pytest.mark.parametrize("name", ["clip_grad_norm_", "_clip_grads_with_norm_"])
def test_clipping_that_is_replaced_midway_counts_from_then_on(name, monkeypatch):
    holder = torch.nn.utils.clip_grad

    def run(train):
        def replace(step):
            if step.step == 3:
                for module in (holder, torch.nn.utils):
                    if hasattr(module, name):
                        monkeypatch.setattr(module, name, nothing)

        job = job_of(clip_grad_norm=1e-3, on_step=replace, steps=8, capture="auto")
        losses = train(job).losses
        monkeypatch.undo()
        return losses

    alone = run(lambda job: wf.run_eager(job, threads=1))
    assert run(lambda job: wf.run([job], "64MiB", threads=1)[job.name]) == alone


def test_gradients_that_a_captured_step_has_not_left_are_missed_aloud():
    def replace(step):
        if step.step == 3:
            job.optimizer.zero_grad = nothing

    job = job_of(on_step=replace, steps=8, capture=True)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], "64MiB", threads=1)[job.name]
    assert report.state == "failed"
    assert report.steps == 3
    assert "zero_grad was replaced" in report.error
