"""DeepFM (Guo et al., IJCAI 2017): a factorisation machine and a network over the same embedding.

Sized for Criteo's ad clicks: 13 numbers, put into classes, and 26 categories make 39 fields, the
values of each hashed to 1,000 (our choice; Guo et al. keep all values, over a million). A batch is
the value of each field, (N, 39), and whether the ad was clicked, (N,), 0.0 or 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]

#: Share of Criteo's ads that are clicked.
_CLICKED = 0.26


@dataclass(frozen=True, kw_only=True)
class DeepFmConfig:
    """The sizes of a DeepFM; the defaults are those of Guo et al.."""

    fields: int = 39
    values: int = 1_000
    width: int = 10
    layers: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.5


def pairwise_products(vectors: torch.Tensor) -> torch.Tensor:
    """The sum of the inner products of all pairs of fields: (N, fields, width) to (N,).

    Half of the square of the sum less the sum of the squares (Rendle, 2010): linear in the fields.
    """
    squared_sum = vectors.sum(1).square()
    sum_of_squares = vectors.square().sum(1)
    return (squared_sum - sum_of_squares).sum(1) / 2


class DeepFm(nn.Module):
    """Values of the fields (N, fields) to logits of a click (N,)."""

    offsets: torch.Tensor

    def __init__(self, config: DeepFmConfig) -> None:
        super().__init__()
        rows = config.fields * config.values
        self.first_order = nn.Embedding(rows, 1)
        self.vectors = nn.Embedding(rows, config.width)
        for table in (self.first_order, self.vectors):
            nn.init.normal_(table.weight, std=0.01)
        # One table for all fields: those of a field begin at its offset.
        offsets = torch.arange(config.fields) * config.values
        self.register_buffer("offsets", offsets, persistent=False)
        self.deep = _network(config)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Logits; the network's last bias is that of the whole model."""
        rows = values + self.offsets
        vectors = self.vectors(rows)
        linear = self.first_order(rows).sum((1, 2))
        deep = self.deep(vectors.flatten(1)).squeeze(1)
        logits: torch.Tensor = linear + pairwise_products(vectors) + deep
        return logits


def _network(config: DeepFmConfig) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = config.fields * config.width
    for width in config.layers:
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(config.dropout)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


def click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean binary cross entropy of the clicks."""
    values, clicked = batch
    return F.binary_cross_entropy_with_logits(model(values), clicked)


def _impressions(count: int, config: DeepFmConfig) -> Batch:
    values = torch.randint(config.values, (count, config.fields))
    return values, (torch.rand(count) < _CLICKED).float()


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _task(name: str, parameters: int, config: DeepFmConfig) -> Task:
    return Task(
        name=name,
        unit="impressions",
        parameters=parameters,
        model=lambda: DeepFm(config),
        loss=click_loss,
        batch=lambda count: _impressions(count, config),
        optimizer=_adam,
    )


DEEPFM = _task("deepfm", 906_601, DeepFmConfig())
DEEPFM_SMALL = _task(
    "deepfm_small", 1_125, DeepFmConfig(fields=5, values=20, width=4, layers=(16, 16))
)
