"""The plain loop: what a step consists of, in which order, and when a run ends."""

import math

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import waterflow as wf
from tests.support.data import rows
from tests.support.steps import first_batch, job_of
from waterflow.job.training_step import (
    check_finite,
    eager_step,
    learning_rates,
    needs_closure,
    run_eager,
    step_scheduler,
)

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


class Recorded(optim.SGD):
    """Notes when it is called."""

    def __init__(self, parameters, calls):
        super().__init__(parameters, lr=0.5)
        self.calls = calls

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)

    def step(self, closure=None):
        (norm,) = {float(p.grad.norm()) for p in self.param_groups[0]["params"]}
        self.calls.append(("step", round(norm, 4)))
        return super().step(closure)


class One(nn.Module):
    """Its loss is its only weight, times 3."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))


def three_times(model, batch):
    return 3 * model.weight.sum()


def test_a_step_drops_gradients_computes_clips_and_updates():
    calls = []
    job = job_of(One, lambda p: Recorded(p, calls), three_times, [None], clip_grad_norm=1.0)
    job.model.weight.grad = torch.tensor([100.0])
    loss = eager_step(job, None, after_backward=lambda: calls.append(float(job.model.weight.grad)))
    assert loss == 6.0
    assert calls == ["zero_grad", 3.0, ("step", 1.0)]
    assert float(job.model.weight) == pytest.approx(1.5)


def test_a_closure_is_a_whole_pass_each_time():
    seen = []
    job = job_of(One, lambda p: optim.LBFGS(p, lr=0.1, max_iter=3), three_times, [None])
    loss = eager_step(job, None, after_backward=lambda: seen.append(float(job.model.weight.grad)))
    assert loss == 6.0  # of the first evaluation
    assert len(seen) > 1
    assert set(seen) == {3.0}


class WithDefault(optim.SGD):
    def step(self, closure=None, other=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "needs"), [(optim.SGD, False), (optim.LBFGS, True), (WithDefault, False)]
)
def test_who_needs_a_closure(kind, needs):
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert needs_closure(optimizer) is needs
    lr_scheduler.ExponentialLR(optimizer, 0.9)  # wraps the object's step
    assert needs_closure(optimizer) is needs


def test_a_scheduler_is_stepped_when_it_is_due_and_told_the_loss_if_it_asks():
    job = job_of(scheduler_every="epoch")
    job.scheduler = lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    step_scheduler(job, "step", 1.0)
    assert learning_rates(job) == (0.1,)
    step_scheduler(job, "epoch", 1.0)
    assert learning_rates(job) == (0.05,)
    job.scheduler = lr_scheduler.ReduceLROnPlateau(job.optimizer, factor=0.1, patience=0)
    for loss in (1.0, 2.0):
        step_scheduler(job, "epoch", loss)
    assert learning_rates(job) == (pytest.approx(0.005),)


def test_rates_of_an_optimizer_without_any_are_nan():
    job = job_of()
    del job.optimizer.param_groups[0]["lr"]
    (rate,) = learning_rates(job)
    assert math.isnan(rate)


def test_a_loss_that_is_no_number_ends_a_job_that_asks_for_it():
    check_finite(job_of(), 3, math.nan)
    with pytest.raises(wf.NonFiniteLossError, match="job 'a': the loss of step 3 is nan"):
        check_finite(job_of(stop_on_nan=True), 3, math.nan)


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [({"epochs": 2}, 4, 2), ({"steps": 3}, 3, 1), ({"steps": 9, "epochs": 1}, 2, 1)],
)
def test_a_run_ends_with_its_epochs_or_steps(options, steps, epochs):
    job = job_of(data=[rows(4), rows(8)], **options)
    report = run_eager(job, threads=1)
    assert (report.state, report.steps, report.epochs) == ("finished", steps, epochs)
    assert len(report.losses) == steps


def test_a_callback_may_stop_it():
    told = []

    def on_step(result):
        told.append((result.job, result.step, result.epoch, result.learning_rates))
        return wf.STOP if result.step == 3 else None

    job = job_of(data=[rows(4), rows(8)], epochs=5, on_step=on_step)
    assert run_eager(job).state == "stopped"
    assert told == [("a", 1, 0, (0.1,)), ("a", 2, 0, (0.1,)), ("a", 3, 1, (0.1,))]


def test_a_run_leaves_the_callers_stream_and_threads_alone():
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    job = job_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    first = run_eager(job, threads=2).losses
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    again = job_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    assert run_eager(again).losses == first


def test_a_run_without_a_seed_draws_one():
    job = job_of()
    job.seed = None
    torch.manual_seed(3)
    one = run_eager(job).seed
    assert run_eager(job).seed != one


def test_data_that_end_before_the_steps_are_done_are_an_error():
    job = job_of(data=iter([first_batch(job_of())]), epochs=2)
    with pytest.raises(ValueError, match="job 'a': its data yielded no batch in epoch 1"):
        run_eager(job)


def decayed(model):
    """Groups that list the parameters in another order than the model, as for weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    return optim.AdamW(groups, lr=0.1)


def deep():
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(4, 1))


def squared(model, batch):
    return (model(batch) ** 2).sum() * 50


@pytest.mark.parametrize("capture", [True, False])
def test_gradients_are_clipped_in_the_order_of_the_model(capture):
    data = list(torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(2)))
    model = deep()
    optimizer = decayed(model)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    job_model = deep()
    job = wf.Job(
        "clipped",
        model=job_model,
        optimizer=decayed(job_model),
        loss=squared,
        data=data,
        clip_grad_norm=0.1,
        capture=capture,
    )
    report = wf.run([job], memory="16MiB", threads=1)
    assert report["clipped"].captured == ("captured" if capture else "opaque step")
    assert report["clipped"].losses == losses
    for a, b in zip(model.parameters(), job_model.parameters(), strict=True):
        assert torch.equal(a, b)
