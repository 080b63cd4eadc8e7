"""Which optimizers are captured, which run eagerly and why; either way the numbers are equal."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import waterflow as wf
from tests.support.differences import assert_same_numbers, solo
from tests.support.jobs import OPTIMIZERS, SCHEDULERS, build
from tests.support.models import Mlp
from waterflow.capture.forward import trace_forward
from waterflow.capture.join import gradient_layouts
from waterflow.capture.optimizer import trace_optimizer
from waterflow.job.batch import flatten
from waterflow.job.optimizer_state import NotCapturableError, hyperparameters, state_layout

pytestmark = pytest.mark.cpu

EAGER = {
    "radam": "depends on its state",
    "asgd": "depends on its state",
    "rprop": "makes a tensor",
    "adafactor": "depends on its state",
}


def traces(job):
    """The traces of the first and of every later step."""
    forward = trace_forward(job, flatten(job.data[0]))
    layouts = gradient_layouts(job, forward)
    first = trace_optimizer(job, layouts, state_layout(job.optimizer))
    return first, trace_optimizer(job, layouts, first.state_after)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "tensor_lr_scheduled", "tensor_lr_fused"])
def test_captured_or_not(name):
    job = {**OPTIMIZERS, **SCHEDULERS}[name]()
    reason = EAGER.get(name.partition("_")[0])
    if reason is not None:
        with pytest.raises(NotCapturableError, match=reason):
            traces(job)
        return
    first, steady = traces(job)
    assert not steady.outputs
    assert first.valid_for(hyperparameters(job.optimizer))
    assert steady.valid_for(hyperparameters(job.optimizer))


def test_live_hyperparameters_need_no_new_trace():
    job = build("job", Mlp, optimizer=lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1))
    _, steady = traces(job)
    (group,) = job.optimizer.param_groups
    group["lr"], group["betas"] = 0.003, (0.8, 0.99)
    assert steady.valid_for(hyperparameters(job.optimizer))
    group["weight_decay"] = 0.0  # decides whether there is a decay at all
    assert not steady.valid_for(hyperparameters(job.optimizer))


def test_another_tensor_as_learning_rate_needs_a_new_trace():
    job = OPTIMIZERS["tensor_lr_adam"]()
    _, steady = traces(job)
    (group,) = job.optimizer.param_groups
    group["lr"].fill_(0.5)
    assert steady.valid_for(hyperparameters(job.optimizer))
    group["lr"] = group["lr"].clone()
    assert not steady.valid_for(hyperparameters(job.optimizer))


class Custom(optim.Optimizer):
    """A step of one's own, in plain torch."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        parameter.sub_(parameter.grad.sign() * group["lr"])


class CountsItself(Custom):
    def update(self, parameter, group):
        self.calls += 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / self.calls)


class CountsInGroup(Custom):
    def update(self, parameter, group):
        group["k"] = group.get("k", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


class CountsInState(Custom):
    def update(self, parameter, group):
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


class ReadsNorm(Custom):
    def update(self, parameter, group):
        norm = float(parameter.grad.norm())
        parameter.sub_(parameter.grad, alpha=group["lr"] / (norm + 1))


class Skips(Custom):
    def update(self, parameter, group):
        if parameter.grad.abs().max() > 0.2:
            parameter.sub_(parameter.grad, alpha=group["lr"])


class EverySecond(Custom):
    def update(self, parameter, group):
        state = self.state[parameter]
        state["step"] = state.get("step", torch.zeros(())) + 1
        if int(state["step"].item()) % 2:
            parameter.sub_(parameter.grad, alpha=group["lr"])


class AssignsData(Custom):
    def update(self, parameter, group):
        parameter.data = parameter.data - group["lr"] * parameter.grad


class StateOfItsOwn(Custom):
    def update(self, parameter, group):
        total = self.state.setdefault("total", torch.zeros(()))
        total += parameter.grad.norm()
        parameter.sub_(parameter.grad / (1 + total), alpha=group["lr"])


OWN = [CountsItself, CountsInGroup, CountsInState, ReadsNorm, Skips, EverySecond, StateOfItsOwn]


@pytest.mark.parametrize("kind", [*OWN, AssignsData])
def test_what_a_graph_cannot_follow_runs_eagerly(kind):
    with pytest.raises(NotCapturableError):
        traces(build("job", Mlp, optimizer=kind))


@pytest.mark.parametrize("kind", [Custom, *OWN])
def test_numbers_of_an_optimizer_of_ones_own(kind):
    eager, job = (build("job", Mlp, optimizer=kind) for _ in range(2))
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, solo(job))


def test_a_captured_optimizer_is_untouched():
    job = build("job", Mlp, optimizer=CountsItself)
    before = dict(vars(job.optimizer))
    with pytest.raises(NotCapturableError):
        traces(job)
    assert job.optimizer.calls == 0
    assert not job.optimizer.state
    assert job.optimizer.param_groups is before["param_groups"]
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in job.model.parameters())


@pytest.mark.parametrize(
    "options",
    [{"optimizer": optim.LBFGS}, {"scheduler": lr_scheduler.ReduceLROnPlateau}],
    ids=["lbfgs", "plateau"],
)
def test_closures_and_metrics_are_given_as_the_loop_gives_them(options):
    eager, job = (build("job", Mlp, **options) for _ in range(2))
    assert_same_numbers(eager, wf.run_eager(eager, threads=1), job, solo(job))
