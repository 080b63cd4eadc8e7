"""Which jobs share the traces of their optimizers' steps; it changes nobody's numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.jobs import build
from tests.support.models import Mlp
from waterflow.capture import optimizer_cache
from waterflow.capture.optimizer import trace_optimizer
from waterflow.study.footprint import footprint_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def traced(monkeypatch):
    """The jobs whose optimizers have been traced, one entry for each kind of step."""
    found = []

    def counting(job, *args):
        found.append(job.name)
        return trace_optimizer(job, *args)

    monkeypatch.setattr(optimizer_cache, "trace_optimizer", counting)
    return found


class Masked(optim.SGD):
    """Has a tensor, a number and a list of its own."""

    def __init__(self, parameters, seed=0, scale=1.0, signs=(1.0,)):
        super().__init__(parameters, lr=0.1)
        generator = torch.Generator().manual_seed(seed)
        (group,) = self.param_groups
        self.masks = [torch.rand(p.shape, generator=generator).round() for p in group["params"]]
        self.scale, self.signs = scale, list(signs)

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for parameter, mask in zip(group["params"], self.masks, strict=True):
            if parameter.grad is not None:
                for sign in self.signs:
                    parameter.add_(parameter.grad * mask, alpha=-0.1 * sign * self.scale)


def hooked(parameters, factor):
    own = optim.SGD(parameters, lr=0.1)
    (group,) = own.param_groups

    def scale(*_):
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    own.register_step_pre_hook(scale)
    return own


def halved_groups(parameters, rates):
    parameters = list(parameters)
    pairs = zip((parameters[:2], parameters[2:]), rates, strict=True)
    return optim.SGD([{"params": part, "lr": rate} for part, rate in pairs], momentum=0.9)


def together(named):
    """The same jobs, one by one by the plain loop and all in one engine, must train alike."""
    reference = [build(name, Mlp, **options) for name, options in named.items()]
    jobs = [build(name, Mlp, **options) for name, options in named.items()]
    expected = [wf.run_eager(job, threads=1) for job in reference]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for alone, its_report, job in zip(reference, expected, jobs, strict=True):
        assert_same_numbers(alone, its_report, job, report.jobs[job.name])
        assert report.jobs[job.name].captured == "captured", report.jobs[job.name].notes
    losses = [tuple(each.losses) for each in expected]
    assert len(set(losses)) == len(losses)  # what differs must matter


def each(kind, **values):
    """Jobs with optimizers of one kind that differ in one argument."""
    ((key, chosen),) = values.items()
    return {str(i): {"optimizer": partial(kind, **{key: v})} for i, v in enumerate(chosen)}


@pytest.mark.parametrize(
    "jobs",
    [
        each(optim.AdamW, lr=(0.1, 0.01, 0.003)),
        each(partial(optim.Adam, lr=0.05), betas=((0.9, 0.99), (0.8, 0.999))),
        each(partial(optim.SGD, lr=0.1, weight_decay=0.1), momentum=(0.9, 0.5)),
        each(halved_groups, rates=((0.1, 0.2), (0.05, 0.01))),
    ],
    ids=["lr", "betas", "momentum", "groups"],
)
def test_trials_share_them(jobs, traced):
    together(jobs)
    assert len(traced) == 2  # the step that makes the state, and every other


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")
def test_trials_with_schedulers_share_them(traced):
    schedulers = (partial(lr_scheduler.ExponentialLR, gamma=gamma) for gamma in (0.9, 0.5))
    together(
        {
            f"{i}": {"optimizer": partial(optim.AdamW, lr=0.1), "scheduler": scheduler}
            for i, scheduler in enumerate(schedulers)
        }
    )
    assert len(traced) == 2


@pytest.mark.parametrize(
    "jobs",
    [
        each(partial(optim.SGD, lr=0.1), momentum=(0.0, 0.9)),
        each(partial(optim.SGD, lr=0.1), weight_decay=(0.0, 0.3)),
        each(partial(optim.SGD, lr=0.1, momentum=0.9), nesterov=(False, True)),
        each(partial(optim.Adam, lr=0.1), maximize=(False, True)),
        each(optim.SGD, lr=(torch.tensor(0.1), torch.tensor(0.3))),
        each(Masked, scale=(1.0, 2.0)),
        each(Masked, signs=((1.0,), (1.0, 0.5))),
        each(hooked, factor=(0.5, 2.0)),
        {
            f"{norm}": {"optimizer": partial(optim.SGD, lr=0.1), "clip_grad_norm": norm}
            for norm in (0.1, 0.2)
        },
        {
            "frozen": {
                "optimizer": partial(optim.SGD, lr=0.1),
                "prepare": lambda net, own: net.one.requires_grad_(False),
            },
            "whole": {"optimizer": partial(optim.SGD, lr=0.1)},
        },
    ],
    ids=[
        *("momentum", "decay", "nesterov", "maximize", "tensor_rates"),
        *("attribute", "list", "hooks", "clipping", "frozen"),
    ],
)
def test_what_an_optimizer_does_otherwise_is_traced_for_itself(jobs, traced):
    together(jobs)
    assert set(traced) == jobs.keys()


def test_a_smaller_last_batch_needs_no_new_trace(traced):
    data = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (6, 6, 2)]
    job = build("job", Mlp, optimizer=partial(optim.AdamW, lr=0.1), data=lambda: data)
    wf.run([job], memory=MEMORY, threads=1)
    assert len(traced) == 2


def test_trials_of_other_widths_share_them(traced):
    own = partial(optim.AdamW, lr=0.1)
    jobs = {f"{width}": (partial(Mlp, width), own) for width in (4, 7, 9)}
    reference = [build(name, model, optimizer=chosen) for name, (model, chosen) in jobs.items()]
    trials = [build(name, model, optimizer=chosen) for name, (model, chosen) in jobs.items()]
    expected = [wf.run_eager(job, threads=1) for job in reference]
    report = wf.run(trials, memory=MEMORY, threads=1)
    for alone, its_report, job in zip(reference, expected, trials, strict=True):
        assert_same_numbers(alone, its_report, job, report.jobs[job.name])
        assert report.jobs[job.name].captured == "captured", report.jobs[job.name].notes
    assert len(traced) == 2


def test_the_latest_are_kept(traced):
    traces = optimizer_cache.OptimizerTraces()
    for norm in (*range(4, 13), 5, 4):  # 4 is the one that had to go
        job = build(f"{norm}", Mlp, optimizer=partial(optim.SGD, lr=0.1), clip_grad_norm=norm)
        footprint_of(job, traces=traces)
    assert traced == [*map(str, range(4, 13)), "4"]
