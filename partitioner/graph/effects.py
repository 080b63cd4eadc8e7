"""What a node does besides computing its value: writes to memory, draws of random numbers.

Requires a captured graph of ATen operators; ensures that nodes which keep to `dependencies` compute
the same in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from waterflow.partitioner.graph.step_graph import tensors_of


def seeded(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    tags: Any = getattr(node.target, "tags", [])
    return torch.Tag.nondeterministic_seeded in tags


def only_copied(node: fx.Node) -> bool:
    """Whether a constant of a graph is a number written in the code: each step takes a copy."""
    copy = torch.ops.aten.lift_fresh_copy.default
    return all(user.target is copy for user in node.users)


def draws_on_host(node: fx.Node) -> bool:
    """Whether a node draws random numbers from the host's generator, as a data loader does."""
    return seeded(node) and all(tensor.device.type == "cpu" for tensor in tensors_of(node))


#: Operators that update the running statistics they are given, though their schemas do not say so.
_UPDATES_STATISTICS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
}


def _is_written(argument: Any, updates_statistics: bool) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    return updates_statistics and argument.name in ("running_mean", "running_var")


def writes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    updates_statistics = schema.name in _UPDATES_STATISTICS
    if not (schema.is_mutable or updates_statistics):
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if _is_written(argument, updates_statistics):
            given = position < len(node.args)
            value = node.args[position] if given else node.kwargs.get(argument.name)
            fx.map_arg(value, written.append)
    return written


def storage_ids(node: fx.Node) -> set[int]:
    """Identities of the (fake) storages behind a node's value."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node)}


def written_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """Identities of the storages that some node writes to."""
    targets = {target for node in nodes for target in writes(node)}
    return {identity for target in targets for identity in storage_ids(target)}


def memory_roots(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node one that stands for the memory it shares with others (views, in-place)."""
    roots: dict[fx.Node, fx.Node] = {}
    storages: dict[int, fx.Node] = {}  # some views are not declared in their schemas

    def find(node: fx.Node) -> fx.Node:
        while roots.setdefault(node, node) is not node:
            node = roots[node]
        return node

    for node in nodes:
        for touched in (node, *node.all_input_nodes):
            find(touched)
        for tensor in tensors_of(node):
            holder = storages.setdefault(tensor.untyped_storage()._cdata, node)
            roots[find(node)] = find(holder)
        for source in _aliased(node):
            roots[find(node)] = find(source)
    return {node: find(node) for node in list(roots)}


def _aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory a node's value may share."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # getitem takes a part of a result; arithmetic on numbers shares nothing
        return list(node.all_input_nodes)
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            given = position < len(node.args)
            value = node.args[position] if given else node.kwargs.get(argument.name)
            fx.map_arg(value, found.append)
    return found


def dependencies(nodes: Sequence[fx.Node]) -> dict[int, set[int]]:
    """For each node (by its place) the nodes that must run before it.

    Those whose values it reads; for memory that is written, the last write before each read and all
    reads before the next write; and for draws of random numbers their order.
    """
    place = {node: index for index, node in enumerate(nodes)}
    roots = memory_roots(nodes)
    found: dict[int, set[int]] = {}
    last_write: dict[fx.Node, int] = {}
    reads: defaultdict[fx.Node, set[int]] = defaultdict(set)
    last_draw: int | None = None
    for index, node in enumerate(nodes):
        needed = {place[source] for source in node.all_input_nodes if source in place}
        written = {roots[target] for target in writes(node)}
        touched = {roots[source] for source in node.all_input_nodes if source in roots}
        for root in touched | written:
            if root in last_write:
                needed.add(last_write[root])
        for root in written:
            needed |= reads.pop(root, set())
            last_write[root] = index
        for root in touched - written:
            reads[root].add(index)
        if seeded(node):
            if last_draw is not None:
                needed.add(last_draw)
            last_draw = index
        found[index] = needed - {index}
    return found
