"""Batches of all the kinds that data sets come in, and the losses that take them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    weight: float = 0.5
    names: tuple[str, ...] = ("a", "b")


def rows(count=8, kind="rows"):
    """Inputs and labels: real rows, tokens or images."""
    generator = torch.Generator().manual_seed(7)
    y = torch.randint(0, 3, (count,), generator=generator)
    if kind == "tokens":
        return torch.randint(0, 11, (count, 5), generator=generator), y
    if kind == "images":
        return torch.randn(count, 1, 8, 8, generator=generator), y
    return torch.randn(count, 4, generator=generator), y


def pairs(kind="rows", sizes=(4, 4)):
    """Batches of (x, y) of these sizes."""
    x, y = rows(sum(sizes), kind)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def loader(kind="rows"):
    """A data loader that shuffles, with a last batch that is smaller."""
    return DataLoader(TensorDataset(*rows(10, kind)), batch_size=4, shuffle=True)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def squares(model, batch):
    return model(batch).square().mean()


def dict_loss(model, batch):
    parts = batch["parts"]
    return parts["weight"] * F.cross_entropy(model(batch["x"]), parts["y"][0])


def record_loss(model, batch):
    return batch.weight * F.cross_entropy(model(batch.x), batch.y)


def transposed_loss(model, batch):
    x, y = batch
    found, wanted = model(x).t(), F.one_hot(y, 3).float().t()
    return F.mse_loss(found, wanted) + F.smooth_l1_loss(found, wanted)


def penalty_loss(model, batch):
    """A gradient penalty: backward through a backward."""
    x, y = batch
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * gradient.square().sum()


def hf_loss(model, batch):
    return model(**batch).loss


def dicts():
    return [{"x": x, "parts": {"y": [y], "weight": 0.5, "name": "z"}} for x, y in pairs()]


def named():
    return [Pair(*pair) for pair in pairs()]


def records():
    return [Record(*pair) for pair in pairs()]
