"""Runs each parameter's update as soon as its gradient is there; the step computes the same bits.

A captured step has all updates behind the backward pass, so all gradients are there at once. Only
nodes of the backward pass and behind it move: kernels of the forward pass ask for gradient mode,
which follows the captured border.
"""

from __future__ import annotations

import dataclasses

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
    """Indices: the forward pass and the spine of the backward pass as captured, each update, with
    all that it alone needs, behind the last node of the spine that it depends on."""
    needed = dependencies(nodes)
    served, writing = _served(step, nodes, needed, border)
    depends = [index < border for index in range(len(nodes))]  # on the forward pass
    spine = [index < border for index in range(len(nodes))]
    latest = [index if index < border else -1 for index in range(len(nodes))]  # of the spine
    updates: dict[int, list[int]] = {}
    for index in range(border, len(nodes)):
        depends[index] = any(depends[other] for other in needed[index])
        spine[index] = depends[index] and served[index] != 1
        latest[index] = max((latest[other] for other in needed[index]), default=-1)
        if spine[index]:
            latest[index] = index
        elif index in writing:
            updates.setdefault(latest[index], []).append(index)
    order: dict[int, None] = {}
    for index in range(len(nodes)):
        if spine[index]:
            _emit(index, needed, order)
            for update in updates.get(index, ()) if index >= border else ():
                _emit(update, needed, order)
    for index in range(len(nodes)):
        _emit(index, needed, order)
    return list(order)


def _emit(index: int, needed: dict[int, set[int]], order: dict[int, None]) -> None:
    """Puts a node into the order behind all that it needs."""
    waiting = [index]
    while waiting:
        one = waiting[-1]
        missing = [other for other in needed[one] if other not in order]
        if one in order or not missing:
            order.setdefault(one)
            waiting.pop()
        else:
            waiting += sorted(missing, reverse=True)


def _served(
    step: StepGraph, nodes: list[fx.Node], needed: dict[int, set[int]], border: int
) -> tuple[dict[int, int], set[int]]:
    """How many parameters' updates need each node behind the border (2: more than one), and which
    of them write to parameters or the optimizer's state."""
    roots = memory_roots(nodes)
    inputs = step.inputs.items()
    kinds = {roots[node]: meaning.kind for meaning, node in inputs if node in roots}
    owners: dict[int, set[fx.Node]] = {index: set() for index in range(len(nodes))}
    writing: set[int] = set()
    for index in range(len(nodes) - 1, border - 1, -1):
        for target in writes(nodes[index]):
            kind = kinds.get(roots[target])
            if kind in _UPDATED:
                writing.add(index)
            if kind == "parameter":
                owners[index].add(roots[target])
        for other in needed[index]:
            if len(owners[other]) < 2:
                owners[other] |= owners[index]
    return {index: min(2, len(found)) for index, found in owners.items()}, writing
