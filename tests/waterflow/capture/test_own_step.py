"""Steps of the user's own as one graph: what is shared between jobs, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.jobs import gan
from tests.support.steps import first_batch, steps_of
from waterflow.job.batch import flatten

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def pair(
    name: str,
    *,
    factor: float = 1.0,
    rate: float = 0.01,
    clips: bool = True,
    drops: bool = True,
    order: Any = (0, 1),
    dropout: float = 0.1,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **options: Any,
) -> wf.Job:
    """Two networks in one step; what is given is how trials may differ."""
    torch.manual_seed(3)
    nets = [
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 6))
        for _ in range(2)
    ]
    optimizers = [kind(net.parameters(), lr=rate, **options) for net in nets]

    def step(batch: torch.Tensor) -> torch.Tensor:
        for place in order:
            if drops:
                optimizers[place].zero_grad()
            loss = F.mse_loss(nets[place](batch), nets[1 - place](batch).detach()) * factor
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(nets[place].parameters(), 0.5)
            optimizers[place].step()
        return loss

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 6, generator=generator) for _ in range(6)]
    return wf.Job(name, model=nets, optimizers=optimizers, step=step, data=data, epochs=2, seed=4)


def trained(jobs: list[wf.Job], fresh: list[wf.Job]) -> wf.Report:
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for job, other in zip(jobs, fresh, strict=True):
        assert_same_numbers(other, wf.run_eager(other, threads=1), job, report[job.name])
        assert report[job.name].captured == "captured", report[job.name].notes
    return report


def test_trials_of_other_rates_share_one_capture():
    rates = (0.01, 0.02, 0.003)
    made = [[pair(f"rate-{rate}", rate=rate) for rate in rates] for _ in range(2)]
    report = trained(*made)
    assert [job.capture_shared_with is None for job in report].count(True) == 1


@pytest.mark.parametrize(
    "other",
    [
        *({"factor": 2.0}, {"clips": False}, {"drops": False}, {"order": (1, 0)}),
        *({"dropout": 0.2}, {"amsgrad": True}, {"kind": torch.optim.AdamW}),
        *({"order": (0, 1, 0)}, {"maximize": True}, {"foreach": True}),
    ],
    ids=str,
)
def test_trials_that_do_otherwise_share_none(other):
    made = [[pair("one"), pair("other", **other)] for _ in range(2)]
    report = trained(*made)
    assert [job.capture_shared_with for job in report] == [None, None]


def test_other_gradients_before_the_first_step_are_not_shared():
    """Steps that add up begin with what is there."""
    made = [[pair("one", drops=False), pair("other", drops=False)] for _ in range(2)]
    for jobs in made:
        for parameter in jobs[1].model.parameters():
            parameter.grad = torch.ones_like(parameter)
    trained(*made)


def test_a_budget_that_holds_the_step_and_its_gradients():
    """What is left between steps counts, and the whole stays within its limit."""
    job, fresh = gan(epochs=8), gan(epochs=8)
    need = wf.run([gan(epochs=2)], memory=MEMORY, threads=1)["gan"].solo_peak_bytes
    report = wf.run([job], memory=2 * need, threads=1)
    assert_same_numbers(fresh, wf.run_eager(fresh, threads=1), job, report["gan"])
    assert report["gan"].captured == "captured", report["gan"].notes
    assert report.peak_bytes <= 2 * need


def test_forward_passes_behind_a_backward_pass_run_with_gradient_mode_on():
    """As in the eager step, in which kernels may ask; backward passes and updates with it off."""
    job = pair("one", clips=False)
    report = eager_report(job)
    batch = flatten(first_batch(job))
    steps = steps_of(job)
    steps.cache.collect_persistent()
    graph = steps.builder.build(batch).steady.graph
    modes = [
        (str(n.target), n.meta["gradient_mode"]) for n in graph.nodes if "gradient_mode" in n.meta
    ]
    assert report.steps
    forward = [on for name, on in modes if name == "aten.tanh.default"]
    backward = [on for name, on in modes if name == "aten.tanh_backward.default"]
    updates = [on for name, on in modes if name == "aten.addcdiv_.default"]
    assert (forward, set(backward), set(updates)) == ([True] * 4, {False}, {False})
    switches = steps.builder.build(batch).steady.compiled.lowered.gradient_switches
    assert len(switches) == 3  # off in the first passes' backward, on in the second's forward, off


def eager_report(job: wf.Job) -> wf.JobReport:
    """Of a run that leaves gradients and state behind."""
    return wf.run_eager(job, threads=1)


def test_a_plan_of_an_opaque_step_says_why():
    job = pair("one")
    job.step = lambda batch: F.mse_loss(job.model[0](batch), batch).item()
    with pytest.raises(wf.CaptureError, match=r"test_own_step\.py:\d+ in .*needs the value"):
        wf.plan([job], memory="1MiB")


def test_a_plan_of_gradients_that_come_and_go_says_why():
    job = pair("one")
    parameter = next(job.model[0].parameters())

    def step(batch: torch.Tensor) -> torch.Tensor:
        had = parameter.grad is not None
        loss = F.mse_loss(job.model[0](batch), batch)
        loss.backward()
        if had:
            parameter.grad = None
        return loss

    job.step = step
    with pytest.raises(wf.CaptureError, match="leaves gradients where there were none"):
        wf.plan([job], memory="1MiB")


def asking(kind: str, *, remedied: bool) -> wf.Job:
    """A step of which a part of torch asks for values, or does no longer."""
    torch.manual_seed(3)
    net = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(net.parameters())
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler" and not remedied)
    options: dict[str, Any] = {}
    if kind == "averaged" and remedied:
        options["on_step"] = lambda result: averaged.update_parameters(net)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(batch), batch)
        if kind == "distribution":
            validate = False if remedied else None
            loss = -Normal(net(batch), 1.0, validate_args=validate).log_prob(batch).mean()
        if kind == "scaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if kind == "clipping":
                clip = nn.utils.clip_grad_norm_
                clip(net.parameters(), 1.0, error_if_nonfinite=not remedied)
            optimizer.step()
        if kind == "averaged" and not remedied:
            averaged.update_parameters(net)
        return loss

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 6, generator=generator) for _ in range(6)]
    job = {"model": net, "optimizer": optimizer, "modules": averaged, "step": step, "data": data}
    return wf.Job("asking", **job, epochs=2, seed=4, **options)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("distribution", "validate_args=False"),
        ("averaged", "call update_parameters in on_step"),
        ("scaler", "enabled=False|changes closure variable 'scaler'"),  # whichever is seen first
        ("clipping", "error_if_nonfinite=True; leave that out"),
    ],
)
def test_where_torch_asks_for_values_there_is_a_remedy(kind, remedy):
    job, fresh = asking(kind, remedied=False), asking(kind, remedied=False)
    with pytest.warns(wf.OpaqueStepWarning, match=remedy):
        report = wf.run([job], memory=MEMORY, threads=1)["asking"]
    assert report.captured == "opaque step"
    assert report.tiers == []
    assert_same_numbers(fresh, wf.run_eager(fresh, threads=1), job, report)
    remedied = asking(kind, remedied=True)
    better = wf.run([remedied], memory=MEMORY, threads=1)["asking"]
    assert (better.captured, better.notes) == ("captured", [])
    if kind != "scaler":
        assert_same_numbers(job, report, remedied, better)
