# ruff: noqa: C408  (a table of keyword arguments reads best as calls)
"""Jobs with state in places that a checkpoint has to find, besides those of the equality table."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf
from tests.support.data import cross_entropy, loader, pairs, rows
from tests.support.jobs import adamw, table
from tests.support.models import Cnn, Mlp, Noisy


class Augmented(Dataset):
    """Draws for each sample from all three of a process's streams, and from one of its own."""

    def __init__(self):
        self.x, self.y = rows(10)
        self.own = np.random.default_rng(3)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + self.own.random() + torch.rand(())
        return self.x[index] + 0.1 * float(noise), self.y[index]


class ShuffledByHand:
    """An iterable with a random state of its own, and another one that it makes anew."""

    def __init__(self):
        self.own = random.Random(9)

    def __iter__(self):
        batches, noise = pairs(sizes=(4, 4, 2)), random.Random(1)
        self.own.shuffle(batches)
        for x, y in batches:
            yield x + noise.random(), y


class Counting:
    """Data that counts its epochs and tells it."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([(x * self.epoch, y) for x, y in pairs(sizes=(4, 4, 2))])

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Annealed(Mlp):
    """Counts its steps, and lets the count into the numbers; goes over to evaluation after six."""

    def __init__(self):
        super().__init__()
        self.calls, self.rate = 0, 0.5

    def forward(self, x):
        self.calls += 1
        self.rate *= 0.9
        if self.calls == 4:
            self.two.weight.requires_grad_(False)
        return self.two(F.dropout(torch.tanh(self.one(x)), self.rate, training=self.calls < 6))


class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.LazyLinear(5), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Warmup:
    """A scheduler of the user's own."""

    def __init__(self, optimizer):
        self.optimizer, self.done = optimizer, 0

    def step(self):
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * min(self.done, 4)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Counted(optim.SGD):
    """Halves its step every third time, by a count of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.times = 0

    def step(self, closure=None):
        self.times += 1
        for group in self.param_groups:
            group["lr"] = 0.05 if self.times % 3 == 0 else 0.1
        return super().step(closure)


_OWN = torch.Generator()


def own_noise(model, batch):
    x, y = batch
    return F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=_OWN)), y)


def with_generator():
    data = TensorDataset(*rows(10))
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def shared_generator():
    """The loader draws from the generator that the loss draws from."""
    _OWN.manual_seed(4)
    return DataLoader(TensorDataset(*rows(10)), 4, shuffle=True, generator=_OWN)


def augmented():
    return DataLoader(Augmented(), 4, shuffle=True)


def with_workers():
    return DataLoader(Augmented(), 4, shuffle=True, num_workers=1)


RESUMABLE = table(
    generator=dict(model=Mlp, data=with_generator),
    generator_of_two=dict(model=Noisy, data=shared_generator, loss=own_noise),
    augmented=dict(model=Noisy, data=augmented, optimizer=adamw),
    shared=dict(model=Noisy, data=lambda: wf.shared(loader(), seed=1)),
    workers=dict(model=Noisy, data=with_workers),
    by_hand=dict(model=Noisy, data=ShuffledByHand),
    counting=dict(model=Mlp, data=Counting),
    annealed=dict(model=Annealed),
    lazy=dict(model=Lazy),
    warmup=dict(model=Mlp, scheduler=Warmup),
    counted=dict(model=Mlp, optimizer=Counted),
    lbfgs=dict(model=Mlp, optimizer=partial(optim.LBFGS, lr=0.1, max_iter=3, history_size=3)),
    half=dict(
        model=lambda: Mlp().bfloat16(),
        optimizer=adamw,
        loss=lambda m, b: cross_entropy(m, (b[0].bfloat16(), b[1])).float(),
    ),
    channels_last=dict(
        model=lambda: Cnn().to(memory_format=torch.channels_last),
        data=partial(pairs, "images"),
        optimizer=adamw,
    ),
    plateau_clipped=dict(
        model=Noisy,
        optimizer=adamw,
        scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=1),
        clip_grad_norm=0.5,
    ),
    sequential=dict(
        model=Mlp,
        scheduler=lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
            [3],
        ),
    ),
    cycle=dict(
        model=Mlp,
        scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=50),
    ),
)
