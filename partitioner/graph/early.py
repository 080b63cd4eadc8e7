"""Runs each parameter's update as soon as its gradient is there; the step stays bit for bit the same.

A captured step has all updates behind the backward pass, so all gradients are there at once. Only
nodes of the backward pass and behind it move: kernels of the forward pass ask for gradient mode,
which follows the captured border.
"""

from __future__ import annotations

import dataclasses
import heapq

from torch import fx

from waterflow.partitioner.graph.effects import dependencies, memory_roots, writes
from waterflow.partitioner.graph.step_graph import StepGraph

_UPDATED = ("parameter", "state")


def update_early(step: StepGraph) -> StepGraph:
    """The same step with its updates as early as their gradients allow; itself if it has none."""
    nodes = step.nodes
    if step.forward_end is None:
        return step
    border = nodes.index(step.forward_end)
    order = _early_order(step, nodes, border)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in step.inputs.values():
        copies[node] = graph.node_copy(node)
    for index in order:
        copies[nodes[index]] = graph.node_copy(nodes[index], lambda n: copies[n])
    outputs = {key: copies[node] for key, node in step.outputs.items()}
    graph.output((copies[step.loss], tuple(outputs.values())))
    return dataclasses.replace(
        step,
        graph=graph,
        loss=copies[step.loss],
        outputs=outputs,
        forward_end=copies[nodes[order[border]]],
    )


def _early_order(step: StepGraph, nodes: list[fx.Node], border: int) -> list[int]:
    """Indices: the forward pass as captured; behind it whatever belongs to an update as soon as it
    can run, else the next node as captured."""
    needed = dependencies(nodes)
    urgent = _updates(step, nodes, border)
    ranks = [0 if index < border else 2 - (index in urgent) for index in range(len(nodes))]
    waiting = [len(needed[index]) for index in range(len(nodes))]
    users: dict[int, list[int]] = {}
    for index, others in needed.items():
        for other in others:
            users.setdefault(other, []).append(index)
    ready = [(ranks[index], index) for index, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for user in users.get(index, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (ranks[user], user))
    return order


def _updates(step: StepGraph, nodes: list[fx.Node], border: int) -> set[int]:
    """Nodes behind the border that serve nothing but to change parameters and the optimizer's
    state: those that write there, and those whose every reader does or serves one that does."""
    roots = memory_roots(nodes)
    inputs = [node for meaning, node in step.inputs.items() if meaning.kind in _UPDATED]
    kept = {roots[node] for node in inputs if node in roots}
    found: set[fx.Node] = set()
    for index in range(len(nodes) - 1, border - 1, -1):
        node = nodes[index]
        readers = [reader for reader in node.users if reader.op == "call_function"]
        is_write = any(roots.get(target) in kept for target in writes(node))
        if is_write or (readers and all(reader in found for reader in readers)):
            found.add(node)
    return {index for index, node in enumerate(nodes) if node in found}
