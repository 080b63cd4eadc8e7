"""Sums are made in place where nobody reads the summand afterwards, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import waterflow as wf
from waterflow.partitioner.graph.inplace import add_in_place
from waterflow.study.footprint import footprint_of

pytestmark = pytest.mark.cpu

SIZE = 4


def graph_of(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    (results,) = next(node for node in module.graph.nodes if node.op == "output").args
    kept = results if isinstance(results, (tuple, list)) else [results]
    add_in_place(module.graph, kept)
    module.recompile()
    return module


def in_place(module: fx.GraphModule) -> int:
    return sum(n.target is torch.ops.aten.add_.Tensor for n in module.graph.nodes)


def x() -> torch.Tensor:
    return torch.arange(1.0, SIZE * SIZE + 1).reshape(SIZE, SIZE)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a: a.sin() + a, 1),
        (lambda a: (a.sin() + a) + a, 2),
        (lambda a: a + a.sin(), 0),  # the summand is an input
        (lambda a: a.view(-1) + a.sin().view(-1), 0),  # ... in another shape
        (lambda a: (b := a.sin()) + b, 0),  # both are the same memory
        (lambda a: (b := a.sin()) + b.t(), 0),
        (lambda a: ((b := a.sin()) + a) * b, 0),  # read later
        (lambda a: ((b := a.sin()) + a) * b.view(-1).view(SIZE, SIZE), 0),
        (lambda a: ((b := a.sin()).t() + a) * b, 0),
        (lambda a: ((b := a.sin()) + a, b), 0),  # read after the step
        (lambda a: ((b := a.sin()) + a, b.t()), 0),
        (lambda a: a.sum().expand(SIZE, SIZE) + a, 0),  # one number for all places
        (lambda a: a.sin()[0] + a[0], 0),  # the rest of its memory would be kept
        (lambda a: a.sin()[0].expand(SIZE, SIZE) + a, 0),
        (lambda a: a.sin() + a.double(), 0),  # the sum is of another type
        (lambda a: a.double() + a, 1),
        (lambda a: a.sin() + 1, 1),
        (lambda a: torch.ops.aten._unsafe_view(b := a.sin(), [SIZE, SIZE]) + b * 2 + b, 1),
    ],
)
def test_where_a_sum_may_take_its_summands_place(function, count):
    given_input = x()
    module = graph_of(function, x())
    found, wanted = module(given_input), function(x())
    assert in_place(module) == count
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(given_input, x())


STEPS = st.lists(
    st.tuples(st.sampled_from("+++*svtneu"), st.integers(0, 30), st.integers(0, 30)),
    min_size=2,
    max_size=14,
)


@given(steps=STEPS, results=st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_numbers_are_the_same(steps, results):
    def program(a, b):
        values = [a, b]
        for kind, i, j in steps:
            one, other = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(
                {
                    "+": lambda one=one, other=other: one + other,
                    "*": lambda one=one, other=other: one * other,
                    "s": lambda one=one: one.sin(),
                    "v": lambda one=one: torch.ops.aten.view(one.contiguous(), [SIZE, SIZE]),
                    "t": lambda one=one: one.t(),
                    "n": lambda one=one: one.neg(),
                    "e": lambda one=one: one[0].expand(SIZE, SIZE),
                    "u": lambda one=one: one.reshape(2, 2 * SIZE).chunk(2)[1].reshape(-1)[:1] + one,
                }[kind]()
            )
        return [values[-1 - i % len(values)] for i in results]

    a, b = x(), x().sqrt()
    module = graph_of(program, x(), x().sqrt())
    for found, wanted in zip(module(a, b), program(x(), x().sqrt()), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(a, x())
    assert torch.equal(b, x().sqrt())


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(256, 256)

    def forward(self, inputs):
        for _ in range(12):
            inputs = self.cell(inputs).tanh()
        return inputs


def test_shared_weights_have_one_gradient():
    """Each time step's gradient is added to the first: two matrices at once, and little else."""
    torch.manual_seed(0)
    model = Unrolled()
    weight = model.cell.weight.numel() * 4
    job = wf.Job(
        "a",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda m, b: m(b).square().mean(),
        data=[torch.randn(1, 256)],
    )
    assert 2 * weight <= footprint_of(job).steady.transient_peak_bytes < 2.5 * weight
