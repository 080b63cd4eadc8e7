"""What nodes compute and move, as told from their shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.graphs import step_of
from waterflow.executor.profile.costs import flops, moved_bytes
from waterflow.executor.profile.fake import walk_step

pytestmark = pytest.mark.cpu

X = torch.ones(8, 16)  # 512 bytes


def costs(function, *tensors):
    walk = walk_step(step_of(function, *tensors))
    return {
        name.removeprefix("aten.").partition(".")[0]: (int(f), int(m))
        for name, f, m in zip(walk.operators, walk.flops, walk.moved_bytes, strict=True)
    }


def test_costs_of_nodes():
    table = torch.ones(100, 16)
    ids = torch.arange(5)
    weight = torch.ones(6, 3, 3, 3)

    def function(x, table, ids, images, weight):
        product = x @ x.t()
        looked_up = F.embedding(ids, table)
        maps = F.conv2d(images, weight)
        product.add_(1.0)
        return (product.sum() + looked_up.view(-1).sum() + maps.sum(),)

    found = costs(function, X, table, ids, torch.ones(2, 3, 8, 8), weight)
    assert found["mm"] == (2 * 8 * 16 * 8, 2 * 512 + 256)
    assert found["embedding"] == (5, 5 * 8 + 2 * 5 * 64)  # reads the rows, not the table
    pixels = 2 * 6 * 6 * 6
    assert found["convolution"][0] == 2 * pixels * 27
    assert found["convolution"][1] == 4 * (pixels + 2 * 3 * 64 + 6 * 27)
    assert found["add_"] == (64, 2 * 256)
    assert found["view"] == found["t"] == (0, 0)
    assert found["load"][1] > 0
    assert found["loss"] == (0, 0)


def test_costs_of_a_node_without_tensors_are_nothing():
    step = step_of(lambda x: (x.sum(),), X)
    graph = step.graph
    getitem = graph.call_function(max, (1, 2))
    assert flops(getitem) == moved_bytes(getitem) == 0


def test_writing_reads_nothing_and_new_memory_is_not_filled_in():
    def function(x):
        y = torch.empty_like(x)
        y.copy_(x)
        z = torch.zeros_like(x)
        return ((y * z).sum(),)

    found = costs(function, X)
    assert found["empty_like"][1] == 0
    assert found["copy_"][1] == 2 * 512
    assert found["zeros_like"][1] == 512
    assert found["mul"] == (256, 3 * 512)


def test_what_is_expanded_is_read_once():
    def function(x, row):
        return ((x + row.expand(8, 16)).sum(),)

    assert costs(function, X, torch.ones(16))["add"][1] == 2 * 512 + 64


def test_formulas_of_attention():
    queries = torch.ones(1, 2, 4, 8)

    def function(q):
        return (F.scaled_dot_product_attention(q, q, q).sum(),)

    found = costs(function, queries)
    products = 2 * (2 * 2 * 4 * 8 * 4)  # two of them, two heads, 4 by 8 by 4
    assert max(operations for operations, _ in found.values()) == products
