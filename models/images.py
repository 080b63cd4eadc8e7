"""What the image classifiers of the zoo share: batches and loss.

A batch is images (N, 3, H, W) and their classes (N,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the classes."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def classifier_task(
    name: str,
    parameters: int,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    size: int,
    classes: int,
    loss: Callable[[nn.Module, Batch], torch.Tensor] = classification_loss,
) -> Task:
    """The task of a model for images of `size` x `size` in so many classes; see `Task`."""

    def batch(count: int) -> Batch:
        return torch.randn(count, 3, size, size), torch.randint(classes, (count,))

    return Task(
        name=name,
        unit="images",
        parameters=parameters,
        model=model,
        loss=loss,
        batch=batch,
        optimizer=optimizer,
    )
