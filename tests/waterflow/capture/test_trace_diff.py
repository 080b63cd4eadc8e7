"""Two traces side by side: what differs is live, or no graph follows it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from waterflow.capture.recording import Recording
from waterflow.capture.trace_diff import live_constants, sure_constants
from waterflow.capture.traced_floats import FloatTrace
from waterflow.job.optimizer_state import NotCapturableError

pytestmark = pytest.mark.virtual


def made_of(*calls, tensor=None):
    """A graph of one input and calls on what came before: (function, further arguments)."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    if tensor is not None:
        graph.get_attr("held")
    for function, *arguments in calls:
        node = graph.call_function(function, (node, *arguments))
    graph.output(node)
    return Recording(graph, {"held": tensor} if tensor is not None else {})


def floats(**values):
    """A trace that knows these numbers by name."""
    trace = FloatTrace()
    for name, value in values.items():
        trace.number(value, ("hyper", name))
    return trace


def live(one, other, first=None, second=None):
    return live_constants((one, other), (first or FloatTrace(), second or FloatTrace()))


def test_what_is_equal_is_no_affair_of_hyperparameters():
    one, other = (made_of((torch.mul, 0.5)) for _ in range(2))
    assert live(one, other) == {}


def test_a_number_that_differs_is_its_expression():
    one, other = made_of((torch.mul, 0.1)), made_of((torch.mul, 0.2))
    assert live(one, other, floats(lr=0.1), floats(lr=0.2)) == {("mul", (0, 1)): ("hyper", "lr")}


def test_numbers_inside_of_lists_have_their_place():
    one, other = (made_of((torch.add, [1.0, value])) for value in (0.1, 0.2))
    assert live(one, other, floats(lr=0.1), floats(lr=0.2)) == {("add", (0, 1, 1)): ("hyper", "lr")}


def sure(trace, known=None, fixed=()):
    return sure_constants(trace, known or FloatTrace(), fixed)


def test_one_trace_tells_where_all_numbers_are_known():
    trace = made_of((torch.mul, 0.1), (torch.add, 1.0), (torch.add, [0.3, 2]))
    found = sure(trace, floats(lr=0.1), fixed=[0.3, "text"])
    assert found == {("mul", (0, 1)): ("hyper", "lr")}


@pytest.mark.parametrize("number", [0.5, 65.0, 0.1j, float("inf"), float("nan")])
def test_a_number_of_unknown_origin_needs_another_trace(number):
    assert sure(made_of((torch.mul, number)), floats(lr=0.1)) is None


def test_a_number_of_two_meanings_needs_another_trace():
    assert sure(made_of((torch.mul, 0.1)), floats(lr=0.1, decay=0.1)) is None
    assert sure(made_of((torch.mul, 1.0)), floats(ratio=1.0)) is None


@pytest.mark.parametrize("tensor", [torch.tensor(0.1), torch.ones(2)])
def test_a_tensor_of_unknown_origin_needs_another_trace(tensor):
    assert sure(made_of((torch.mul, 1.0), tensor=tensor)) is None
    assert sure(made_of((torch.mul, 1.0), tensor=torch.tensor(1))) == {}


def test_zeros_of_either_sign_are_other_numbers():
    one, other = made_of((torch.mul, 0.0)), made_of((torch.mul, -0.0))
    with pytest.raises(NotCapturableError, match="outside arithmetic"):
        live(one, other)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (made_of((torch.mul, 0.1)), made_of((torch.mul, 0.2)), "outside arithmetic"),
        (made_of((torch.mul, 0.1)), made_of((torch.add, 0.1)), "its operations depend"),
        (made_of((torch.mul, 1.0)), made_of(), "its operations depend"),
        (
            made_of((torch.mul, [1.0])),
            made_of((torch.mul, [1.0, 1.0])),
            "its operations depe",
        ),
        (made_of((torch.mul, 1)), made_of((torch.mul, 2)), "an argument of .* changes"),
        (
            made_of(tensor=torch.zeros(1)),
            made_of(tensor=torch.ones(1)),
            "makes a tensor of its hyperparameters",
        ),
    ],
    ids=["number", "operator", "one more", "longer", "whole number", "tensor"],
)
def test_what_no_expression_explains(one, other, reason):
    with pytest.raises(NotCapturableError, match=reason):
        live(one, other)


def test_an_expression_has_to_be_that_of_both():
    one, other = made_of((torch.mul, 0.1)), made_of((torch.mul, 0.2))
    with pytest.raises(NotCapturableError, match="outside arithmetic"):
        live(one, other, floats(lr=0.1), floats(weight_decay=0.2))
