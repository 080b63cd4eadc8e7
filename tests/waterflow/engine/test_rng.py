"""Random numbers in an engine: each job and the caller draw what they draw alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

POLICIES = ("flow", "waterwave", "waterwave-s", "temporal")


class Noisy(TensorDataset):
    """Augments by all three libraries, as data sets do."""

    def __getitem__(self, index):
        value, label = super().__getitem__(index)
        return value + torch.randn(()) + random.gauss(0, 1) + np.random.randn(), label


class OwnDropout(nn.Module):
    """Dropout as people write it."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x, 0.7)) + 0.01 * torch.randn_like(x)


def make(name, *, workers=0, noisy=False, draws_after_steps=False, capture=True):
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(96, 12, generator=generator)
    labels = torch.randint(4, (96,), generator=generator)
    linear = [nn.utils.skip_init(nn.Linear, *size) for size in ((12, 24), (24, 24), (24, 4))]
    for weight in nn.ModuleList(linear).parameters():
        weight.data.normal_(std=0.3, generator=generator)
    hidden = [nn.ReLU(), nn.Dropout(0.3), linear[1], OwnDropout()]
    model = nn.Sequential(linear[0], *hidden, linear[2])
    kind = Noisy if noisy else TensorDataset
    loader = DataLoader(kind(values, labels), 16, shuffle=True, num_workers=workers)
    batches = [(values[i : i + 16], labels[i : i + 16]) for i in range(0, 96, 16)]
    return wf.Job(
        name,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        # What a callback draws comes before the next batch: a list draws nothing.
        data=batches if draws_after_steps else loader,
        epochs=2,
        seed=3,
        capture=capture,
        on_step=draw_and_seed if draws_after_steps else None,
    )


def draw_and_seed(result):
    """A validation that draws, seeds and forks."""
    torch.randn(40, 40)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(result.step)
        nn.Linear(9, 9)
    next(iter(DataLoader(TensorDataset(torch.zeros(8, 1)), 4, shuffle=True)))
    random.random(), np.random.rand(3)


JOBS = {
    "captured": {},
    "eager": {"capture": False},
    "noisy": {"noisy": True},
    "noisy eager": {"noisy": True, "capture": False},
    "workers": {"noisy": True, "workers": 2},
    "callback": {"draws_after_steps": True},
    "eager callback": {"draws_after_steps": True, "capture": False},
}


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.fixture(scope="module")
def alone():
    """Each job's losses in the plain loop, every library's stream as when the engine gets it."""
    losses = {}
    threads = torch.get_num_threads()
    for name, form in JOBS.items():
        seed_everything(7)
        losses[name] = wf.run_eager(make(name, **form), threads=1).losses
    torch.set_num_threads(threads)
    return losses


def callers_draws():
    """What the caller's thread does meanwhile: builds models, draws, seeds, saves."""
    drawn = [nn.Linear(20, 20).weight.detach().sum(), torch.rand(3).sum(), torch.randperm(9)[0]]
    drawn += [nn.functional.dropout(torch.ones(30)).sum(), torch.tensor(torch.initial_seed())]
    state = torch.get_rng_state()
    drawn += [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    torch.set_rng_state(state)
    random.shuffle(order := list(range(9)))
    return [float(number) for number in drawn] + order + np.random.permutation(5).tolist()


def hammer(times):
    seed_everything(42)
    found = [callers_draws() for _ in range(5)]
    for step in range(times):
        seed_everything(42 + step)
        found.append(callers_draws())
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_sees_what_others_draw(policy, alone):
    expected = hammer(4)
    rounds = 0
    with wf.Engine("64MiB", policy=policy, threads=1) as engine:
        handles = []
        for name, form in JOBS.items():
            seed_everything(7)
            handles.append(engine.submit(make(name, **form)))
        while any(handle.status in ("queued", "running") for handle in handles):
            assert hammer(4) == expected
            rounds += 1
        reports = {handle.name: handle.result() for handle in handles}
    assert rounds > 3  # the caller did draw meanwhile
    assert {name: report.error for name, report in reports.items() if report.error} == {}
    assert {name: report.losses for name, report in reports.items()} == alone
    assert hammer(4) == expected
    assert type(torch.random.default_generator) is torch.Generator


def test_the_callers_streams_stay_where_they_are():
    seed_everything(5)
    expected = callers_draws()
    seed_everything(5)
    jobs = [make(name, **form) for name, form in JOBS.items()]
    wf.run(jobs, "64MiB", threads=1)
    assert callers_draws() == expected
