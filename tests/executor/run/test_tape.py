"""A compiled tape does what the graph says, lets go of what it no longer needs, and repeats."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from tests.support.graphs import step_of
from tests.support.traces import computed
from waterflow.capture.recording import Recording
from waterflow.executor.run.tape import compile_step
from waterflow.partitioner.graph.step_graph import Input, StepGraph

pytestmark = pytest.mark.cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def run(function, *tensors, generator=None):
    """The loss and the other results of a compiled function, and the same by the interpreter."""
    step = step_of(function, *tensors)
    compiled = compile_step(step)
    compiled.bind({})
    compiled.tape.set_batch([tensor.clone() for tensor in tensors])
    if generator is not None:
        compiled.tape.set_generators(generator, None)
    compiled.tape.run(0, len(compiled.tape))
    found = [compiled.tape.slot(compiled.outputs["out", i]) for i in range(len(step.outputs))]
    expected = computed(Recording(step.graph), [tensor.clone() for tensor in tensors])
    return compiled, float(compiled.tape.loss), found, expected


def check(function, *tensors):
    compiled, loss, found, (expected_loss, *expected) = run(function, *tensors)
    assert loss == float(expected_loss)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    return compiled


def layers(x):
    h = torch.addmm(torch.ones(4), x, x.t() @ x).relu()
    return h.softmax(-1).amax(), h, h.mean(0)


def several_outputs(x):
    values, indices = x.sort(1)
    one, _, three = x[:, :3].split(1, dim=1)
    deviation, mean = torch.std_mean(x, dim=0)
    return values.sum() + one.sum(), indices, three, deviation + mean


def tensor_lists(x):
    parts = list(x.unbind(0))
    torch._foreach_add_(parts, 1.5)
    torch._foreach_mul_(parts, [2.0, 3.0, 4.0])
    more = torch._foreach_sqrt(torch._foreach_abs(parts))
    return torch.cat(more).sum(), torch.stack(parts), *more


def optional_lists(x):
    rows = torch.arange(0, 3, 2)
    y = x.clone()
    y[:, rows] = torch.full((), 7.0)
    y = torch.ops.aten.index_put(y, [rows], torch.full((2, 4), 3.0), True)
    return y[rows, rows].sum(), y, x[..., None, 1:3]


def scalars_and_types(x):
    y = (x > 0).to(torch.int64) * 3 - 1
    z = torch.full((2, 2), 5, dtype=torch.float64) ** 2
    return x.mean(dtype=torch.float64), y, z, x.to(torch.bfloat16).sum(-1, keepdim=True)


def in_place_through_views(x):
    y = x.clone()
    y[1].zero_().add_(2, alpha=3)
    y.t().mul_(0.5)
    y.view(-1)[::2].copy_(torch.arange(6.0))
    return y.sum(), y


@pytest.mark.parametrize(
    "function",
    [
        layers,
        several_outputs,
        tensor_lists,
        optional_lists,
        scalars_and_types,
        in_place_through_views,
    ],
)
def test_the_interpreter_agrees(function):
    check(function, X)


def test_nothing_but_outputs_stays_filled():
    compiled = check(several_outputs, X)
    outputs = set(compiled.outputs.values())
    filled = {slot for slot in compiled.transient if compiled.tape.slot(slot) is not None}
    assert filled == outputs
    compiled.tape.clear(list(outputs))
    assert all(compiled.tape.slot(slot) is None for slot in compiled.transient)


def test_memory_goes_after_the_last_use():
    """A chain of large tensors never holds more than two at once."""
    step = step_of(lambda x: (((x * 2) + 1).exp().sin().sum(),), X)
    compiled = compile_step(step)
    compiled.tape.set_batch([X])
    for index in range(len(compiled.tape)):
        compiled.tape.run(index, index + 1)
        filled = [slot for slot in compiled.transient if compiled.tape.slot(slot) is not None]
        assert len(filled) <= 1


def drawing(x):
    noise = torch.rand(3, 4) + torch.randn_like(x)
    kept, mask = torch.native_dropout(x, 0.5, True)
    return (kept * noise).sum(), noise, mask, torch.empty(5).uniform_(), torch.randperm(6)


def test_draws_come_from_the_jobs_generator():
    _, loss, found, _ = run(drawing, X, generator=torch.Generator().manual_seed(9))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        expected_loss, *expected = drawing(X)
    assert loss == float(expected_loss)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_generator_moves_on_with_each_run():
    step = step_of(lambda x: (x.sum() + torch.rand(()),), X)
    compiled = compile_step(step)
    generator = torch.Generator().manual_seed(4)
    compiled.tape.set_generators(generator, None)
    losses = []
    for _ in range(3):
        compiled.tape.set_batch([X])
        compiled.tape.run(0, len(compiled.tape))
        losses.append(float(compiled.tape.loss))
    reference = torch.Generator().manual_seed(4)
    assert losses == [float(X.sum() + torch.rand((), generator=reference)) for _ in range(3)]


def test_persistent_tensors_are_read_and_written_where_they_are():
    weight = torch.ones(4)

    def function(weight):
        weight.view(2, 2).t().add_(1)  # a view of something persistent: made once, outside
        return ((weight * 2).sum(),)

    step = step_of(function, weight, kind="parameter")
    compiled = compile_step(step)
    compiled.bind({Input("parameter", 0): weight})
    for expected in (16.0, 24.0):
        compiled.tape.run(0, len(compiled.tape))
        assert float(compiled.tape.loss) == expected
    assert weight.tolist() == [3.0] * 4
    compiled.unbind()
    assert compiled.tape.slot(compiled.inputs[Input("parameter", 0)]) is None


def test_live_numbers():
    """loss = x * (rate - read(x) / 3) with a rate that changes between runs."""
    graph, aten = fx.Graph(), torch.ops.aten
    x, rate = graph.placeholder("x"), graph.placeholder("rate")
    x.meta.update(input=Input("batch", 0), val=torch.zeros(()))
    rate.meta["input"] = Input("hyper", (0, "lr"))
    read = graph.call_function(aten._local_scalar_dense.default, (x,))
    third = graph.call_function(operator.truediv, (read, 3.0))
    factor = graph.call_function(operator.sub, (rate, third))
    loss = graph.call_function(aten.mul.Scalar, (x, factor))
    loss.meta["val"] = torch.zeros(())
    graph.output(((loss), ()))
    compiled = compile_step(StepGraph(graph, loss))
    for value in (0.1, 0.7):
        compiled.tape.set_batch([torch.tensor(2.0, dtype=torch.float64)])
        compiled.tape.set_register(compiled.registers[0, "lr"], value)
        compiled.tape.run(0, len(compiled.tape))
        assert float(compiled.tape.loss) == 2.0 * (value - 2.0 / 3.0)


def test_a_whole_backward_pass():
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))
    parameters = [parameter.detach().clone() for parameter in net.parameters()]

    def function(x, *weights):
        weights = [weight.detach().requires_grad_() for weight in weights]
        names = [name for name, _ in net.named_parameters()]
        out = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))
        loss = out.logsumexp(1).mean()
        return loss, *torch.autograd.grad(loss, weights)

    check(function, X, *parameters)


def test_an_operator_that_fails_leaves_its_error():
    step = step_of(lambda x, i: (x[:, i].sum(),), X, torch.tensor([1]))
    compiled = compile_step(step)
    compiled.tape.set_batch([X, torch.tensor([9])])
    with pytest.raises(IndexError, match="out of bounds"):
        compiled.tape.run(0, len(compiled.tape))
    compiled.tape.clear(compiled.transient)
    compiled.tape.set_batch([X, torch.tensor([1])])
    compiled.tape.run(0, len(compiled.tape))
    assert float(compiled.tape.loss) == float(X[:, 1].sum())
