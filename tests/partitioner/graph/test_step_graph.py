import pytest
import torch
from torch import fx

from waterflow.partitioner.graph.step_graph import Input, StepGraph, tensors_of

pytestmark = pytest.mark.virtual

ATEN = torch.ops.aten


def step(operator=ATEN.mul.Tensor, kind="parameter", shape=(2, 3), factor=2.0, name="weight"):
    """loss = sum(operator(parameter, batch) * factor)"""
    graph = fx.Graph()
    weight, batch = graph.placeholder("w"), graph.placeholder("x")
    weight.meta.update(input=Input(kind, name), val=torch.empty(shape, device="meta"))
    batch.meta.update(input=Input("batch", 0), val=torch.empty(shape, device="meta"))
    product = graph.call_function(operator, (weight, batch))
    product.meta["val"] = torch.empty(shape, device="meta")
    scaled = graph.call_function(ATEN.mul.Scalar, (product, factor))
    scaled.meta["val"] = torch.empty(shape, device="meta")
    loss = graph.call_function(ATEN.sum.default, (scaled,))
    loss.meta["val"] = torch.empty((), device="meta")
    graph.output((loss, ()))
    return StepGraph(graph, loss)


def test_inputs_and_operations_in_order():
    found = step()
    assert [meaning.kind for meaning in found.inputs] == ["parameter", "batch"]
    assert [node.target for node in found.nodes][-1] is ATEN.sum.default
    assert [meaning.is_persistent for meaning in found.inputs] == [True, False]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "constant", "state"])
def test_what_lives_as_long_as_the_job(kind):
    assert Input(kind, 0).is_persistent
    assert not Input("hyper", 0).is_persistent


def test_equal_steps_have_equal_fingerprints_whatever_their_names():
    assert step().fingerprint() == step(name="other").fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        {"operator": ATEN.div.Tensor},
        {"kind": "buffer"},
        {"shape": (3, 2)},
        {"factor": 3.0},
    ],
    ids=str,
)
def test_anything_that_computes_otherwise_is_another_step(other):
    assert step(**other).fingerprint() != step().fingerprint()


def test_strides_and_outputs_count():
    transposed = step()
    transposed.nodes[0].meta["val"] = torch.empty(3, 2, device="meta").t()
    kept = step()
    kept.outputs["gradient", 0] = kept.nodes[0]
    assert len({found.fingerprint() for found in (step(), transposed, kept)}) == 3


def test_the_tensors_of_a_node():
    node = step().nodes[0]
    one, other = torch.empty(1), torch.empty(2)
    node.meta["val"] = (one, [other, None], 3)
    assert [len(tensor) for tensor in tensors_of(node)] == [1, 2]
    del node.meta["val"]
    assert list(tensors_of(node)) == []
