"""What varies from run to run: followed through graphs of real operators, as if on a GPU."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from waterflow.partitioner.graph import variation
from waterflow.partitioner.graph.step_graph import Input, StepGraph
from waterflow.partitioner.graph.variation import _UNORDERED, is_chosen_by_clock, varying

pytestmark = pytest.mark.cpu

ATEN = torch.ops.aten
WEIGHT, BIAS, RATE = (Input("parameter", name) for name in ("weight", "bias", "rate"))


class Builder:
    """A step graph, operator by operator; fake tensors say what is on which device."""

    def __init__(self, device="cuda"):
        self.graph, self.mode, self.device = fx.Graph(), FakeTensorMode(), device

    def input(self, meaning, *shape, dtype=torch.float32):
        node = self.graph.placeholder(f"{meaning.kind}_{meaning.key}")
        with self.mode:
            node.meta = {
                "input": meaning,
                "val": torch.empty(shape, dtype=dtype, device=self.device),
            }
        return node

    def __call__(self, operator, *arguments):
        node = self.graph.call_function(operator, arguments)
        values = fx.map_arg(arguments, lambda argument: argument.meta["val"])
        with self.mode:
            node.meta["val"] = operator(*values)
        return node

    def step(self, loss, **outputs):
        return StepGraph(self.graph, loss, outputs)


def embedding_step(device="cuda"):
    """A weight's gradient that varies, a bias' that does not."""
    make = Builder(device)
    weight, bias = make.input(WEIGHT, 10, 4), make.input(BIAS, 4)
    tokens = make.input(Input("batch", 0), 8, dtype=torch.int64)
    rows = make(ATEN.embedding.default, weight, tokens)
    loss = make(ATEN.sum.default, make(ATEN.add.Tensor, rows, bias))
    ones = make(ATEN.ones_like.default, rows)
    grown = make(ATEN.embedding_dense_backward.default, ones, tokens, 10, -1, False)
    return make, weight, bias, loss, grown, make(ATEN.sum.dim_IntList, ones, [0])


def test_only_what_comes_of_it_varies():
    make, weight, bias, loss, grown, even = embedding_step()
    make(ATEN.add_.Tensor, weight, grown)
    make(ATEN.add_.Tensor, bias, even)
    found = varying(make.step(loss, state=make(ATEN.mul.Tensor, grown, grown), other=even))
    assert found.inputs == {WEIGHT}
    assert found.outputs == {"state"}
    assert not found.loss


def test_lists_are_followed_element_by_element():
    make, weight, bias, loss, grown, even = embedding_step()
    squares = make(ATEN._foreach_mul.List, [grown, even], [grown, even])
    one, other = (make(operator.getitem, squares, place) for place in (0, 1))
    make(ATEN._foreach_add_.List, [weight, bias], [one, other])
    found = varying(make.step(loss))
    assert found.inputs == {WEIGHT}


def test_a_number_of_all_gradients_carries_it_to_all():
    make, weight, bias, loss, grown, even = embedding_step()
    total = make(ATEN.add.Tensor, make(ATEN.norm.Scalar, grown), make(ATEN.norm.Scalar, even))
    make(ATEN._foreach_mul_.Tensor, [weight, bias], total)
    assert varying(make.step(loss)).inputs == {WEIGHT, BIAS}


def test_views_and_writes_carry_it():
    make, weight, bias, loss, grown, _ = embedding_step()
    part = make(ATEN.select.int, grown, 0, 0)
    make(ATEN.copy_.default, make(ATEN.view.default, bias, [4]), part)
    make(ATEN.copy_.default, weight, make(ATEN.ones_like.default, weight))
    assert varying(make.step(loss)).inputs == {BIAS}


def test_the_loss_may_vary():
    make, _, _, _, grown, _ = embedding_step()
    assert varying(make.step(make(ATEN.sum.default, grown))).loss


def test_sparse_tensors_are_followed_too(monkeypatch):
    make, weight, _, loss, grown, _ = embedding_step("cpu")
    monkeypatch.setattr(variation, "is_unordered", lambda node: node is grown)
    grown.meta["val"] = torch.eye(10, 4).to_sparse()
    added = make.graph.call_function(ATEN.add_.Tensor, (weight, grown))
    added.meta["val"] = weight.meta["val"]
    assert varying(make.step(loss)).inputs == {WEIGHT}


def test_nothing_varies_on_the_host():
    make, weight, _, loss, grown, _ = embedding_step("cpu")
    make(ATEN.add_.Tensor, weight, grown)
    assert not varying(make.step(loss))


def test_nothing_varies_with_deterministic_algorithms():
    make, weight, _, loss, grown, _ = embedding_step()
    make(ATEN.add_.Tensor, weight, grown)
    step = make.step(loss)
    torch.use_deterministic_algorithms(True)
    try:
        assert not varying(step)
    finally:
        torch.use_deterministic_algorithms(False)
    assert varying(step)


@pytest.mark.parametrize(
    "name",
    [
        "aten::embedding_dense_backward",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
        "aten::scatter_add",
        "aten::index_add_",
        "aten::upsample_bilinear2d_backward",
        "aten::_upsample_bilinear2d_aa_backward",
        "aten::_adaptive_avg_pool2d_backward",
        "aten::max_pool3d_with_indices_backward",
        "aten::reflection_pad2d_backward",
        "aten::grid_sampler_2d_backward",
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_cudnn_rnn_backward",
        "aten::convolution_backward",
        "aten::cumsum",
    ],
)
def test_kernels_that_add_in_no_fixed_order(name):
    assert hasattr(torch.ops.aten, name.removeprefix("aten::"))
    assert _UNORDERED.fullmatch(name)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_convolutions_are_chosen_by_the_clock_in_benchmark_mode(device, monkeypatch):
    make = Builder(device)
    image = make.input(Input("batch", 0), 2, 3, 8, 8)
    weight = make.input(WEIGHT, 4, 3, 3, 3)
    arguments = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution = make(ATEN.convolution.default, *arguments)
    assert not is_chosen_by_clock(convolution)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert is_chosen_by_clock(convolution) == (device == "cuda")


@pytest.mark.parametrize(
    "name", ["mm", "sum", "index", "cat", "add_", "native_layer_norm_backward"]
)
def test_kernels_that_repeat_their_bits(name):
    assert hasattr(torch.ops.aten, name)
    assert not _UNORDERED.fullmatch(f"aten::{name}")
