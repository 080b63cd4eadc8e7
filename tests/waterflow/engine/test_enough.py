"""Whoever gives a run the memory that a BudgetError names has enough."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.support.tables import crossed

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "Adam": torch.optim.Adam,
    "RAdam": torch.optim.RAdam,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4),
}
GROWING = (8, 8, 8, 64, 512, 512, 512)


class Stream:
    """Batches whose sizes nobody knows before they come."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches(sizes):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 64, generator=generator), torch.ones(n).long()) for n in sizes]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def asking(model, batch):
    value = cross_entropy(model, batch)
    return 2 * value if value > 1e9 else value


class Deep(nn.Module):
    """Little to read, and many activations: more than a guess by the batch would have."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(16 if place else 1, 16, 3, padding=1) for place in range(8)
        )
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        x = x.reshape(-1, 1, 8, 8)
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x)) * 1.5
        return self.last(x.mean((2, 3)))


def job(name="a", optimizer="Adam", sizes=(16,) * 5, deep=False, stream=False, **options):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    model = Deep() if deep else mlp
    data = Stream(batches(sizes)) if stream else batches(sizes)
    settings = {"loss": cross_entropy, "data": data, "seed": 0, **options}
    return wf.Job(
        name, model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), **settings
    )


CASES = {
    **{name: lambda name=name: [job(optimizer=name)] for name in OPTIMIZERS},
    "captured": lambda: [job(capture=True), job("b", "RAdam", capture=True)],
    "eager": lambda: [job(capture=False), job("b", "SGD")],
    "opaque": lambda: [job(loss=asking)],
    "deep": lambda: [job(deep=True, sizes=(64,) * 4)],
    "deep and eager": lambda: [job(deep=True, capture=False), job("b", "SGD", deep=True)],
    "growing": lambda: [job(sizes=GROWING), job("b", "SGD", sizes=(8,) * 9)],
    "growing and eager": lambda: [job(sizes=GROWING, capture=False)],
}


def named(error):
    """The bytes that an error says would do."""
    found = re.search(r"all of them under (\d+) bytes|memory=(\d+) bytes", str(error))
    return int(found[1] or found[2])


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_named_is_enough(case, tiers, monkeypatch):
    monkeypatch.setenv("WATERFLOW_TIERS", tiers)
    make = CASES[case]
    with pytest.raises(wf.BudgetError, match="too small even for one job after another") as caught:
        wf.run(make(), 20_000, threads=1)
    report = wf.run(make(), named(caught.value), threads=1)
    report.raise_errors()
    assert {one.state for one in report} == {"finished"}


@pytest.mark.parametrize(("policy", "capture"), crossed(["flow", "waterwave"], ["auto", True]))
def test_a_shape_that_comes_later(policy, capture):
    def make():
        other = job("b", "SGD", sizes=(8,) * 30, capture=capture)
        return [job(sizes=GROWING, stream=True, capture=capture), other]

    with pytest.raises(wf.BudgetError, match="Larger batches that come later need more") as first:
        wf.run(make(), 20_000, threads=1)
    small = wf.run(make(), named(first.value), policy=policy, threads=1)
    with pytest.raises(wf.BudgetError, match="its present batch needs more") as later:
        small.raise_errors()
    report = wf.run(make(), named(later.value), policy=policy, threads=1)
    report.raise_errors()


def test_finding_it_out_changes_nothing():
    one, alone = job(capture=False), job(capture=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(wf.BudgetError):
            wf.run([one], 20_000, threads=1)
    assert wf.run([one], "16MiB", threads=1)["a"].losses == wf.run_eager(alone, threads=1).losses
