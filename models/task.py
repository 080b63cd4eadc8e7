"""What it takes to train a model of the zoo: model, loss, batches and its usual optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its usual training, in the sizes of its paper or in small ones for tests.

    Attributes:
        name: what users write, such as "resnet50"; a small variant's ends in "_small".
        unit: what a batch counts, in the plural: "images", "sequences".
        parameters: number of trained parameters, a tied one counted once.
        model: makes the model.
        loss: ``(model, batch) -> scalar tensor``.
        batch: makes a batch of that many units: random contents, real shapes and types, drawn from
            torch's default generator. The first dimension of its tensors is the batch, unless
            the docstring of the task's file says otherwise.
        optimizer: makes the usual optimizer over the given parameters.
    """

    name: str
    unit: str
    parameters: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: Callable[[int], Any]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
