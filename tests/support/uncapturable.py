"""Models whose steps depend on what a graph cannot hold, each with the reason that is expected."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.data import cross_entropy
from tests.support.models import Mlp


class Branches(Mlp):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return super().forward(-x)


class ReadsItem(Mlp):
    def forward(self, x):
        return super().forward(x) * x.abs().max().item()


class UsesNumpy(Mlp):
    def forward(self, x):
        return super().forward(x) + torch.from_numpy(x.numpy().mean(1, keepdims=True))


class PythonRandom(Mlp):
    def forward(self, x):
        return super().forward(x) * random.random()


class NumpyRandom(Mlp):
    def forward(self, x):
        return super().forward(x) * float(np.random.rand())


class Counts(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Remembers(Mlp):
    """Stores its hidden state as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def forward(self, x):
        hidden = torch.tanh(self.one(x))
        out = self.two(hidden if self.hidden is None else hidden + self.hidden)
        self.hidden = hidden.detach().mean(0)
        return out


class Logs(Mlp):
    """Keeps a list of what went by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        out = super().forward(x)
        self.seen.append(len(x))
        return out * len(self.seen)


class ChangesBatch(Mlp):
    def forward(self, x):
        return super().forward(x.mul_(0.9))


class Checkpointed(Mlp):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.two(checkpoint(self._part, x, use_reentrant=False))

    def _part(self, x):
        return torch.tanh(self.dropout(self.one(x)))


class LazyBuffer(Mlp):
    """Registers a buffer in its first forward pass."""

    def forward(self, x):
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.full((3,), 0.5))
        return super().forward(x) * self.scale


class ReplacesParameter(Mlp):
    def forward(self, x):
        self.one.weight = nn.Parameter(self.one.weight.detach() * 0.9)
        return super().forward(x)


class AssignsData(Mlp):
    def forward(self, x):
        self.one.weight.data = self.one.weight.data * 0.9
        return super().forward(x)


class CumulativeNorm(Mlp):
    """BatchNorm with a cumulative average divides by a counter that it reads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return super().forward(self.norm(x))


#: name -> (model, a part of the reason, the function whose line is named)
MODELS = {
    "branch": (Branches, "the value of a tensor", "in forward"),
    "item": (ReadsItem, "the value of a tensor", "in forward"),
    "numpy": (UsesNumpy, "numpy", "in forward"),
    "python_random": (PythonRandom, "Python's random", "in cross_entropy"),
    "numpy_random": (NumpyRandom, "numpy.random", "in cross_entropy"),
    "counter": (Counts, "'calls'", "in cross_entropy"),
    "hidden": (Remembers, "'hidden'", "in cross_entropy"),
    "list": (Logs, "'seen'", "in cross_entropy"),
    "batch": (ChangesBatch, "changes its batch in place", "in cross_entropy"),
    "checkpoint": (Checkpointed, "random state", "in cross_entropy"),
    "lazy_buffer": (LazyBuffer, "gains or loses", "in cross_entropy"),
    "data": (AssignsData, "assigns to .data", "in forward"),
    "cumulative": (CumulativeNorm, "the value of a tensor", "in forward"),
}


def counting_loss():
    calls = 0

    def count(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) * calls

    return count


class Smoothed:
    """A loss object with state of its own."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, model, batch):
        self.mean = 0.9 * self.mean + 0.1
        return cross_entropy(model, batch) * self.mean


def per_row_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def number_loss(model, batch):
    return 1.5


def detached_loss(model, batch):
    return cross_entropy(model, batch).detach()


def unregistered_loss():
    scale = torch.ones((), requires_grad=True)
    return lambda model, batch: cross_entropy(model, batch) * scale


def branching_loss(model, batch):
    loss = cross_entropy(model, batch)
    return loss if loss > 0.5 else 2 * loss


#: name -> (makes the loss, a part of the reason, the eager loop can run it)
LOSSES = {
    "closure_counter": (counting_loss, "'calls'", True),
    "object_state": (Smoothed, "loss.mean", True),
    "per_row": (lambda: per_row_loss, "one element", False),
    "number": (lambda: number_loss, "must be a tensor", False),
    "detached": (lambda: detached_loss, "nothing to train", False),
    "unregistered": (unregistered_loss, "needs a gradient", True),
    "branch": (lambda: branching_loss, "the value of a tensor", True),
}

plain_checkpoint = partial(Checkpointed, 0.0)
