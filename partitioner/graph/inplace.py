"""Adds in place what an eager backward pass adds in place.

Where a value has several users, its gradients are summed. Autograd adds them into the first one; on
the tensors of a capture it does not, and each sum would take memory of its own while both summands
are still there: with weights that all time steps share, a second copy of every gradient.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from waterflow.partitioner.graph.effects import memory_roots

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def add_in_place(graph: fx.Graph, kept: Collection[fx.Node], *, scaled: bool = False) -> None:
    """Turns sums into in-place ones where nobody reads the first summand's memory afterwards.

    The numbers stay the same bit for bit: it is the same kernel.

    Args:
        graph: a captured graph, changed in place.
        kept: nodes whose values are read after the step.
        scaled: sums with a factor, too, as of weight decay. Autograd makes none; an optimizer that
            does keeps the first summand, which is then one more copy of the largest gradient.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not any(node.target is _ADD for node in nodes):
        return
    roots = memory_roots(nodes)
    last_read = _last_reads(graph, nodes, roots, kept)
    merged: dict[fx.Node, fx.Node] = {}

    def memory_of(node: fx.Node) -> fx.Node:
        root = roots.get(node, node)
        while root in merged:
            root = merged[root]
        return root

    for position, node in enumerate(nodes):
        if node.target is not _ADD or len(node.args) != 2 or (node.kwargs and not scaled):
            continue
        first, second = node.args
        if not isinstance(first, fx.Node) or not _alike(first, node):
            continue
        memory = memory_of(first)
        apart = not isinstance(second, fx.Node) or memory_of(second) is not memory
        if apart and last_read[memory] == position:
            node.target = _ADD_IN_PLACE
            merged[memory] = memory_of(node)


def _last_reads(
    graph: fx.Graph,
    nodes: list[fx.Node],
    roots: dict[fx.Node, fx.Node],
    kept: Collection[fx.Node],
) -> dict[fx.Node, int]:
    """By memory the place of its last reader; of inputs and kept values, past the end."""
    last = dict.fromkeys(roots.values(), -1)
    for position, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[roots[source]] = position
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in (*inputs, *kept):
        if node in roots:
            last[roots[node]] = len(nodes)
    return last


def _alike(summand: fx.Node, total: fx.Node) -> bool:
    """Whether the sum may lie where the summand lies, and that is all of its memory."""
    one, other = summand.meta.get("val"), total.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    return one.stride() == other.stride() and one.untyped_storage().nbytes() == (
        one.numel() * one.element_size()
    )
