"""A graph convolutional network of two layers (Kipf and Welling, ICLR 2017), sized for Cora.

Each layer computes A' X W (equation 2), with A' = D^-1/2 (A + I) D^-1/2 and D the degrees of
A + I. A' is never made: rows are gathered along the edges and added up where the edges end.

A batch is one graph, counted in nodes: features (nodes, features), edges (2, nodes * degree) as
source over target, both directions of a link, and labels (nodes,), `IGNORED` where a node has none.

On a GPU `index_add` adds in no fixed order, so two runs of this model differ in the last bits
there, however they are run; `torch.use_deterministic_algorithms(True)` gives it an order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: The label of nodes that have none.
IGNORED = -100
#: Cora has 5,429 links between 2,708 nodes: 4 ends of links per node.
DEGREE = 4
#: Cora's share of ones among the features.
_DENSITY = 0.0127
#: Every 19th node has a label: Cora's training set has 140 of the 2,708.
_LABELLED = 19


def weights_of_edges(edges: torch.Tensor, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of D^-1/2 (A + I) D^-1/2 that are not zero.

    Args:
        edges: sources and targets, (2, E); a pair that is there twice counts twice.
        nodes: number of nodes.

    Returns:
        the entries of the edges, (E,), and those that I adds on the diagonal, (nodes,).
    """
    sources, targets = edges
    ones = torch.ones(targets.shape, device=edges.device)
    degrees = torch.ones(nodes, device=edges.device).index_add(0, targets, ones)
    roots = degrees.rsqrt()
    return roots[sources] * roots[targets], 1 / degrees


class Convolution(nn.Module):
    """A' X W, without a bias, as Kipf and Welling have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Maps (nodes, inputs) to (nodes, outputs); `weights` are those of `weights_of_edges`."""
        of_edges, of_nodes = weights
        sources, targets = edges
        x = x @ self.weight  # first, as it makes the rows that travel shorter
        messages = x.index_select(0, sources) * of_edges[:, None]
        return (x * of_nodes[:, None]).index_add(0, targets, messages)


class Gcn(nn.Module):
    """Two layers with a ReLU between them: a graph's features to logits (nodes, classes)."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = Convolution(features, hidden)
        self.second = Convolution(hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Logits of every node; `edges` is (2, E) and has both directions of a link."""
        weights = weights_of_edges(edges, x.shape[0])
        x = F.relu(self.first(self.dropout(x), edges, weights))
        logits: torch.Tensor = self.second(self.dropout(x), edges, weights)
        return logits


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the nodes that have a label."""
    x, edges, labels = batch
    logits: torch.Tensor = model(x, edges)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def citation_graph(nodes: int, features: int, classes: int) -> Batch:
    """A random graph in which a few nodes are cited often, with rows of words that sum to one.

    Raises:
        ValueError: fewer than two nodes, between which there are no links.
    """
    if nodes < 2:
        raise ValueError(f"a graph must have at least 2 nodes to have links, got {nodes}")
    links = nodes * DEGREE // 2
    cited = (torch.rand(links).square() * nodes).long().clamp(max=nodes - 1)
    citing = (cited + torch.randint(1, nodes, (links,))) % nodes  # anyone else
    edges = torch.stack([torch.cat([citing, cited]), torch.cat([cited, citing])])
    words = (torch.rand(nodes, features) < _DENSITY).float()
    words = words / words.sum(1, keepdim=True).clamp(min=1)
    labels = torch.randint(classes, (nodes,))
    return words, edges, labels.masked_fill(torch.arange(nodes) % _LABELLED != 0, IGNORED)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam as in Kipf and Welling, section 5.2: only the first layer's weights decay."""
    weights = list(parameters)
    first: dict[str, Any] = {"params": weights[:1], "weight_decay": 5e-4}
    return torch.optim.Adam([first, {"params": weights[1:]}], lr=0.01)


def _task(name: str, parameters: int, features: int, hidden: int, classes: int) -> Task:
    return Task(
        name=name,
        unit="nodes",
        parameters=parameters,
        model=lambda: Gcn(features, hidden, classes),
        loss=classification_loss,
        batch=lambda nodes: citation_graph(nodes, features, classes),
        optimizer=_adam,
    )


GCN = _task("gcn", 23_040, 1_433, 16, 7)
GCN_SMALL = _task("gcn_small", 408, 48, 8, 3)
