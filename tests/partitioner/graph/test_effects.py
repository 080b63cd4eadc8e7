"""What nodes do to memory and randomness, on graphs of a few real operators."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from waterflow.partitioner.graph.effects import (
    dependencies,
    draws_on_host,
    memory_roots,
    seeded,
    writes,
)

pytestmark = pytest.mark.cpu

ATEN = torch.ops.aten


def nodes_of(function, *arguments):
    graph = make_fx(function)(*arguments).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def named(nodes, target):
    (node,) = (node for node in nodes if node.target is target)
    return node


X = torch.randn(4, 4)


def test_an_in_place_operator_writes_to_its_first_argument():
    nodes = nodes_of(lambda x: (x * 2).add_(1), X)
    assert writes(named(nodes, ATEN.add_.Tensor)) == [named(nodes, ATEN.mul.Tensor)]
    assert writes(named(nodes, ATEN.mul.Tensor)) == []


def test_an_operator_writes_to_every_tensor_of_a_list():
    nodes = nodes_of(lambda x: torch._foreach_add_([x * 2, x * 3], 1.0), X)
    (added,) = (node for node in nodes if "foreach_add_" in str(node.target))
    assert len(writes(added)) == 2


def test_batch_norm_writes_to_its_statistics_though_its_schema_does_not_say_so():
    graph = fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in "xmv")
    norm = graph.call_function(
        ATEN.native_batch_norm.default, (x, None, None, mean, var, True, 0.1, 1e-5)
    )
    assert writes(norm) == [mean, var]


def test_views_share_memory_with_what_they_view():
    nodes = nodes_of(lambda x: (x * 2).view(16)[2:5] + 1, X)
    roots = memory_roots(nodes)
    product, view = named(nodes, ATEN.mul.Tensor), named(nodes, ATEN.view.default)
    part = named(nodes, ATEN.slice.Tensor)
    assert roots[product] is roots[view] is roots[part]
    assert roots[named(nodes, ATEN.add.Tensor)] is not roots[product]


def test_draws_are_known_and_so_is_their_generator():
    nodes = nodes_of(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand(4), X)
    drawing = [node for node in nodes if seeded(node)]
    assert len(drawing) == 2
    assert all(map(draws_on_host, drawing))
    drawing[0].meta["val"] = torch.empty(1, device="meta")
    assert not draws_on_host(drawing[0])


def test_draws_keep_their_order():
    nodes = nodes_of(lambda x: (torch.rand_like(x), torch.randn_like(x)), X)
    needed = dependencies(nodes)
    first, second = (place for place, node in enumerate(nodes) if seeded(node))
    assert first in needed[second]


def test_reads_come_before_the_next_write_and_after_the_last():
    def function(x):
        total = x * 1
        before = total + 1  # reads
        total.mul_(2)  # writes
        after = total + 2  # reads again
        return before, after

    nodes = nodes_of(function, X)
    needed = dependencies(nodes)
    place = {node: index for index, node in enumerate(nodes)}
    write = place[named(nodes, ATEN.mul_.Tensor)]
    before, after = (place[n] for n in nodes if n.target is ATEN.add.Tensor)
    assert before in needed[write]
    assert write in needed[after]
    assert write not in needed[before]


def test_a_write_to_a_view_counts_for_all_of_its_memory():
    def function(x):
        total = x * 1
        row = total[0]
        row.fill_(0)
        return total + 1

    nodes = nodes_of(function, X)
    needed = dependencies(nodes)
    place = {node: index for index, node in enumerate(nodes)}
    assert place[named(nodes, ATEN.fill_.Scalar)] in needed[place[named(nodes, ATEN.add.Tensor)]]
