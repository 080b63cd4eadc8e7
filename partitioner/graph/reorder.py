"""Rewrites a step graph into Waterwave's order; what it computes stays the same, bit for bit."""

from __future__ import annotations

import dataclasses

from torch import fx

from waterflow.partitioner.graph.effects import dependencies
from waterflow.partitioner.graph.order import bfs_depth_order
from waterflow.partitioner.graph.step_graph import StepGraph


def in_bfs_order(step: StepGraph) -> StepGraph:
    """The same step with its nodes ordered by BFS depth (Waterwave, section 4.4).

    Gradient mode follows the captured boundary of forward and backward, which this order dissolves:
    the new step has no `forward_end`.
    """
    nodes = step.nodes
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in step.inputs.values():
        copies[node] = graph.node_copy(node)
    for index in bfs_depth_order(nodes, dependencies(nodes)):
        copies[nodes[index]] = graph.node_copy(nodes[index], lambda n: copies[n])
    outputs = {key: copies[node] for key, node in step.outputs.items()}
    graph.output((copies[step.loss], tuple(outputs.values())))
    return dataclasses.replace(
        step, graph=graph, loss=copies[step.loss], outputs=outputs, forward_end=None
    )
