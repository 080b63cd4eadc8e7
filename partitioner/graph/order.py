"""Waterwave's order of a graph's nodes: breadth first, by depth (Waterwave, section 4.4).

waterflow runs a step in the order in which it was captured; this order is here to compare with
and for graphs that come without one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from waterflow.common.errors import PlanError

T = TypeVar("T")


def bfs_depth_order(nodes: Sequence[T], dependencies: Mapping[int, Collection[int]]) -> list[int]:
    """Indices of ``nodes`` by depth, those of one depth in ascending index.

    ``dependencies`` maps an index to the indices it depends on; one that is missing depends on
    nothing. The depth of a node is the longest path that leads to it from a node without
    dependencies, so that the order is a valid execution order. Raises PlanError on a cycle
    (captured steps have none: loops are unrolled) and on an index outside ``nodes``.
    """
    import networkx as nx  # takes longer to load than all the rest of planning

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for index, needed in dependencies.items():
        for other in (index, *needed):
            if not 0 <= other < len(nodes):
                raise PlanError(f"Node {index} depends on {other}; there are {len(nodes)} nodes.")
        graph.add_edges_from((other, index) for other in needed)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [edge[0] for edge in nx.find_cycle(graph)]
        described = " -> ".join(f"{index} ({nodes[index]})" for index in [*cycle, cycle[0]])
        raise PlanError(f"The graph has a cycle, so no order can run it: {described}.")
    # A node's topological generation is the length of the longest path to it.
    return [index for level in nx.topological_generations(graph) for index in sorted(level)]
