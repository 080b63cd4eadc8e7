"""What the language models of the zoo that guess the next token share: batches and loss.

A batch is token ids and the ids that follow them, both (N, T).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the tokens that follow."""
    ids, following = batch
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def next_token_task(
    name: str,
    parameters: int,
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    length: int,
    vocabulary: int,
) -> Task:
    """The task of a model for sequences of `length` tokens; see `Task`."""

    def batch(sequences: int) -> Batch:
        text = torch.randint(vocabulary, (sequences, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Task(
        name=name,
        unit="sequences",
        parameters=parameters,
        model=model,
        loss=next_token_loss,
        batch=batch,
        optimizer=optimizer,
    )
