import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.errors import PlanError
from waterflow.partitioner import bfs_depth_order

pytestmark = pytest.mark.virtual


def test_by_depth_then_by_index():
    #  0 -> 3 -> 4,  1 -> 4,  2 alone: depths 0 0 0 1 2
    assert bfs_depth_order("abcde", {4: [3, 1], 3: [0]}) == [0, 1, 2, 3, 4]
    # A chain captured first is overtaken by a late root.
    assert bfs_depth_order("abcd", {1: [0], 2: [1]}) == [0, 3, 1, 2]


def test_depth_is_the_longest_path():
    assert bfs_depth_order("abcd", {1: [0], 2: [1, 0], 3: [0]}) == [0, 1, 3, 2]


def test_empty():
    assert bfs_depth_order([], {}) == []


def test_a_cycle_is_refused_by_name():
    with pytest.raises(PlanError, match=r"cycle.*\(add\)"):
        bfs_depth_order(["mul", "add", "sub"], {1: [2], 2: [1]})
    with pytest.raises(PlanError, match="cycle"):
        bfs_depth_order(["mul"], {0: [0]})


def test_unknown_indices_are_refused():
    with pytest.raises(PlanError, match="Node 1 depends on 9; there are 2 nodes"):
        bfs_depth_order("ab", {1: [9]})


@given(edges=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=40))
def test_the_order_can_be_executed(edges):
    needs = {}
    for a, b in edges:
        if a != b:
            needs.setdefault(max(a, b), set()).add(min(a, b))
    order = bfs_depth_order(range(16), needs)
    assert sorted(order) == list(range(16))
    place = {index: at for at, index in enumerate(order)}
    assert all(place[a] < place[b] for b, befores in needs.items() for a in befores)
    graph = nx.DiGraph([(a, b) for b, befores in needs.items() for a in befores])
    depth = dict.fromkeys(range(16), 0)
    for index in nx.topological_sort(graph):
        depth[index] = max((depth[a] + 1 for a in graph.predecessors(index)), default=0)
    assert order == sorted(range(16), key=lambda index: (depth[index], index))
