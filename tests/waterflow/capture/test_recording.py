"""What is recorded of code below autograd: its operators, constants by reference, shapes as they
were."""

from __future__ import annotations

import contextlib
import operator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.support.traces import computed
from waterflow.capture.recording import Recorder
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import fake_twin, trace

pytestmark = pytest.mark.cpu

aten = torch.ops.aten


def recorded(function, *reals):
    """What `function` calls on twins of these tensors."""
    mode = CaptureMode()
    twins = [fake_twin(mode, real) for real in reals]
    return trace(lambda _, tensors: function(*tensors), mode, twins, reals)


def targets(recording):
    return [node.target for node in recording.graph.nodes if node.op == "call_function"]


def assert_computes_the_same(function, *reals):
    """Records, and compares what the graph computes with what the function does."""
    recording = recorded(function, *reals)
    copies = [real.detach().clone() for real in reals]
    for one, other in zip(computed(recording, copies), function(*reals), strict=True):
        assert torch.equal(one, other)
    return recording


def test_operators_below_autograd_are_recorded_with_their_backward():
    def loss(x, w):
        total = (x @ w).relu().sum()
        total.backward()
        return [total, w.grad]

    weight = torch.randn(3, 2, requires_grad=True)
    recording = recorded(loss, torch.randn(4, 3), weight)
    assert {aten.mm.default, aten.relu.default, aten.threshold_backward.default} <= {
        *targets(recording)
    }
    assert weight.grad is None


def test_operators_of_operators_are_taken_apart_where_autograd_is_out_of_the_way():
    weight, bias = torch.randn(3, 4), torch.randn(3)

    def layer(x):
        with torch.inference_mode():
            return [nn.functional.linear(x, weight, bias)]

    assert aten.linear.default not in targets(recorded(layer, torch.randn(2, 4)))


def test_parts_of_results_are_taken_out_of_them():
    recording = assert_computes_the_same(lambda x: list(x.split(2)), torch.arange(4.0))
    assert targets(recording).count(operator.getitem) == 2


def test_calls_in_place_stand_for_the_tensor_afterwards():
    def change(x):
        y = x + 1
        y.mul_(3)
        return [y + y]

    assert_computes_the_same(change, torch.arange(3.0))


def test_a_tensor_that_changes_its_own_shape_is_known_as_it_was():
    def turn(x):
        y = x * 2
        y.t_()
        return [y @ x]

    recording = assert_computes_the_same(turn, torch.randn(2, 3))
    shapes = [tuple(node.meta["val"].shape) for node in recording.graph.nodes if node.users]
    assert (2, 3) in shapes
    assert (3, 2) in shapes


def test_numbers_made_into_tensors_stay_what_they_were_though_the_code_changes_them():
    def count(x):
        one = torch.tensor(1.0)
        one.add_(1)
        return [x * one]

    recording = recorded(count, torch.ones(2))
    for _ in range(2):
        (found,) = computed(recording, [torch.ones(2)])
        assert found.tolist() == [2.0, 2.0]


def test_numbers_that_code_reads_back_are_known():
    assert [
        n for n in targets(recorded(_reads_back, torch.ones(2))) if "local_scalar" in str(n)
    ] == []
    assert_computes_the_same(_reads_back, torch.ones(2))


def _reads_back(x):
    return [x * torch.tensor(2.5).item()]


def test_other_tensors_are_constants_by_reference():
    other = torch.ones(2)
    recording = recorded(lambda x: [x + other], torch.ones(2))
    assert [tensor is other for tensor in recording.constants.values()] == [True]
    other.fill_(5)
    assert computed(recording, [torch.ones(2)])[0].tolist() == [6.0, 6.0]


def test_gradients_are_taken_as_they_are_and_not_copied():
    def loss(w):
        total = (w * 2).sum()
        total.backward()
        return [total, w.grad]

    recording = recorded(loss, torch.ones(3, requires_grad=True))
    assert aten.clone.default not in targets(recording)


def test_what_is_recorded_remembers_no_autograd():
    recording = recorded(lambda w: [(w * 2).sum()], torch.ones(2, requires_grad=True))
    values = [node.meta["val"] for node in recording.graph.nodes if node.op == "call_function"]
    assert not any(value.requires_grad for value in values)


def test_nodes_are_counted_while_they_are_recorded_and_some_are_left_out():
    counts = []

    def counting(recorder, tensors):
        counts.append(recorder.size)
        doubled = tensors[0] * 2
        counts.append(recorder.size)
        with recorder.off():
            doubled + 1
        counts.append(recorder.size)
        return [doubled]

    mode = CaptureMode()
    trace(counting, mode, [fake_twin(mode, torch.ones(2))])
    assert counts == [counts[0], counts[0] + 1, counts[0] + 1]


def test_a_call_can_be_recorded_that_is_not_made():
    recorder = Recorder()
    x = torch.tensor(2.0)
    recorder.add_input(x)
    node = recorder.add_call(aten._local_scalar_dense.default, x)
    assert node.op == "call_function"
    assert [each.op for each in node.args] == ["placeholder"]


def test_what_is_refused_ends_the_trace_though_the_code_catches_it():
    for read in (torch.Tensor.item, torch.Tensor.numpy, torch.nonzero, repr, str, "{}".format):

        def caught(x, read=read):
            with contextlib.suppress(Exception):
                read(x)
            return [x + 1]

        with pytest.raises(Exception, match=r"item|numpy|nonzero|local_scalar|text"):
            recorded(caught, torch.randn(()))


def test_an_error_that_is_noted_is_the_first():
    recorder = Recorder()
    for error in (ValueError("one"), ValueError("two")):
        recorder.note(error)
    with pytest.raises(ValueError, match="one"):
        recorder.check()


def test_code_that_asks_whether_tensors_are_fake_is_not_traced():
    for asks in (
        lambda x: [x + 1] if isinstance(x, FakeTensor) else [x],
        lambda x: [x + 1] if type(x) is torch.Tensor else [x],
        lambda x: [x + 1] if hasattr(x, "fake_mode") else [x],
    ):
        with pytest.raises(RuntimeError, match="of which class a tensor is"):
            recorded(asks, torch.randn(2))
    recorded(lambda x: [x + 1] if isinstance(x, torch.Tensor) else [x], torch.randn(2))
