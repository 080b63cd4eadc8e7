"""A step graph becomes the instructions that one would write by hand."""

import operator

import pytest
import torch
from torch import fx

from tests.support.graphs import step_of
from waterflow.allocator_ext import _C
from waterflow.executor.run.instructions import (
    NOWHERE,
    Argument,
    CallOperator,
    Compute,
    Load,
    ReadLoss,
    ReadScalar,
    holders_of,
    lower_step,
    signature_of,
)
from waterflow.partitioner.graph.step_graph import Input, StepGraph

pytestmark = pytest.mark.cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SLOT, CONSTANT, SLOTS, SINGLE = (
    getattr(_C.ArgumentKind, name) for name in ("SLOT", "CONSTANT", "SLOTS", "SINGLE")
)


def calls(lowered):
    return [made for made in lowered.instructions if isinstance(made, CallOperator)]


def test_a_chain_loads_calls_releases_and_reads_its_loss():
    lowered = lower_step(step_of(lambda x: ((x**2).sum(),), X))
    load, double, total, loss = lowered.instructions
    assert load[1:] == (0, 0, ())
    assert isinstance(load, Load)
    assert double.arguments == (Argument(SLOT, 0), Argument(CONSTANT, 2))
    assert (double.results, double.release) == ((1,), (0,))
    assert (total.results, total.release) == ((2,), (1,))
    assert isinstance(loss, ReadLoss)
    assert (loss.slot, loss.release) == (2, (2,))
    names = [made.name for made in lowered.instructions]
    assert names == ["load", "aten.pow.Tensor_Scalar", "aten.sum.default", "loss"]
    assert lowered.transient == [0, 1, 2]


def test_outputs_and_a_loss_that_is_one_are_kept():
    def function(x):
        y = x + 1
        return y.sum(), y

    step = step_of(function, X)
    lowered = lower_step(step)
    kept = {lowered.outputs["out", 0]}
    assert not kept & {slot for made in lowered.instructions for slot in made.release}
    as_output = StepGraph(step.graph, step.loss, {"loss": step.loss})
    assert lower_step(as_output).instructions[-1].release == ()


def test_what_is_released_is_released_once_after_its_last_reader():
    def function(x):
        y = x.exp()
        parts = y.split(2, dim=1)
        return (parts[0].sum() + (parts[1] * y[:, :2]).sum(),)

    lowered = lower_step(step_of(function, X))
    released = [slot for made in lowered.instructions for slot in made.release]
    assert len(released) == len(set(released))
    read_at = {}
    for index, made in enumerate(lowered.instructions):
        for kind, payload in getattr(made, "arguments", ()):
            if kind == SLOT:
                read_at[payload] = index
    for index, made in enumerate(lowered.instructions[:-1]):
        assert all(read_at.get(slot, index) <= index for slot in made.release)


def test_several_results_go_to_their_readers_or_nowhere():
    lowered = lower_step(step_of(lambda x: (x.max(dim=1)[0].sum(),), X))
    (values, indices) = calls(lowered)[0].results
    assert values >= 0
    assert indices >= 0  # a node reads it, though nobody reads that
    step = step_of(lambda x: (x.max(dim=1)[0].sum(),), X)
    unread = next(node for node in step.nodes if node.args[1:] == (1,) and not node.users)
    step.graph.erase_node(unread)
    assert calls(lower_step(step))[0].results[1] == NOWHERE


def test_lists_of_tensors_and_their_elements():
    def function(x):
        one, two = torch._foreach_sqrt([x, x + x])
        return (torch.cat([one, two]).sum(),)

    lowered = lower_step(step_of(function, X))
    _, roots, joined, _ = calls(lowered)
    assert roots.arguments[0].kind == SLOTS
    (elements,) = roots.results
    assert joined.arguments[0] == Argument(SLOTS, elements)
    roots_node = roots.node
    assert [lowered.slots[node] for node in holders_of(roots_node)] == elements


def test_a_missing_tensor_in_a_list_is_nowhere():
    rows = torch.arange(2)

    def function(x, rows):
        return (x[:, rows].sum(),)

    lowered = lower_step(step_of(function, X, rows))
    index = next(made for made in calls(lowered) if made.signature.name == "aten::index")
    assert index.arguments[1] == Argument(SLOTS, [NOWHERE, 1])


def test_views_of_persistent_tensors_are_made_outside():
    lowered = lower_step(step_of(lambda w: ((w.t()[1:] * 2).sum(),), X, kind="parameter"))
    assert [str(node.target) for node in lowered.views] == ["aten.t.default", "aten.slice.Tensor"]
    assert [made.signature.name for made in calls(lowered)] == ["aten::mul", "aten::sum"]
    fixed = {lowered.inputs[Input("parameter", 0)], *(lowered.slots[n] for n in lowered.views)}
    assert not fixed & set(lowered.transient)
    assert not fixed & {slot for made in lowered.instructions for slot in made.release}


def test_numbers_live_in_registers():
    graph, aten = fx.Graph(), torch.ops.aten
    x, rate = graph.placeholder("x"), graph.placeholder("rate")
    x.meta.update(input=Input("batch", 0), val=torch.zeros(()))
    rate.meta["input"] = Input("hyper", (0, "lr"))
    read = graph.call_function(aten._local_scalar_dense.default, (x,))
    third = graph.call_function(operator.truediv, (read, 3.0))
    less = graph.call_function(operator.neg, (third,))
    factor = graph.call_function(operator.sub, (rate, less))
    loss = graph.call_function(aten.mul.Scalar, (x, factor))
    loss.meta["val"] = torch.zeros(())
    graph.output((loss, ()))
    lowered = lower_step(StepGraph(graph, loss))
    load, reading, dividing, negating, subtracting, scaling, _ = lowered.instructions
    assert isinstance(load, Load)
    assert isinstance(reading, ReadScalar)
    rate_register = lowered.hypers[0, "lr"]
    (three,) = lowered.constants
    assert lowered.constants == {three: 3.0}
    found = [made[1:] for made in (dividing, negating, subtracting)]
    assert all(isinstance(made, Compute) for made in (dividing, negating, subtracting))
    assert found == [
        (_C.Arithmetic.DIVIDE, found[0][1], reading.register, three, ()),
        (_C.Arithmetic.NEGATE, found[1][1], found[0][1], NOWHERE, ()),
        (_C.Arithmetic.SUBTRACT, found[2][1], rate_register, found[1][1], ()),
    ]
    assert scaling.arguments[1] == Argument(_C.ArgumentKind.SCALAR, found[2][1])
    registers = {rate_register, three, reading.register, *(made[1] for made in found)}
    assert registers == set(range(lowered.num_registers))


def numbers_beside(x):
    (scaled,) = calls(lower_step(step_of(lambda x: (x * 2, x), x)))
    return scaled.arguments[1]


def test_a_number_beside_a_float32_is_one():
    assert numbers_beside(X) == Argument(SINGLE, (NOWHERE, 2.0))
    assert numbers_beside(X.double()) == Argument(CONSTANT, 2)
    assert numbers_beside(X.to(torch.bfloat16)) == Argument(CONSTANT, 2)
    assert numbers_beside(X.long()) == Argument(CONSTANT, 2)
    lowered = lower_step(step_of(lambda x: (x + 2**60, x.sum() - True), X))
    assert [made.arguments[1] for made in calls(lowered) if made.signature.name == "aten::add"] == [
        Argument(CONSTANT, 2**60)  # no double says all of it
    ]


def test_draws_take_the_jobs_generator():
    lowered = lower_step(step_of(lambda x: (x.uniform_().sum(),), X))
    draw = next(made for made in calls(lowered) if made.signature.generator is not None)
    place = draw.signature.generator
    assert draw.arguments[place] == Argument(_C.ArgumentKind.GENERATOR, False)


def test_the_backward_pass_begins_at_an_instruction():
    step = step_of(lambda x: ((x * 2).exp().sum(),), X)
    assert lower_step(step).boundary is None
    exp = next(node for node in step.nodes if "exp" in str(node.target))
    marked = StepGraph(step.graph, step.loss, forward_end=exp)
    assert lower_step(marked).boundary == 2


def test_a_signature_has_every_default():
    signature = signature_of(torch.ops.aten.add.Tensor)
    assert (signature.name, signature.overload, signature.num_returns) == ("aten::add", "Tensor", 1)
    assert [name for name, _ in signature.parameters] == ["self", "other", "alpha"]
    assert signature.parameters[2][1] == Argument(CONSTANT, 1)
    assert signature.generator is None


def test_an_instruction_of_the_wrong_form_is_refused():
    tape = _C.Tape(2, 0)
    with pytest.raises(RuntimeError, match="unknown argument kind 17"):
        tape.add_operator("aten::neg", "", [(17, 0)], [1], [])
    with pytest.raises(RuntimeError, match="unknown argument kind 5"):  # the schema's to say
        tape.add_operator("aten::neg", "", [(5, 0)], [1], [])
    with pytest.raises(TypeError):
        tape.add_arithmetic("+", 0, 0, 0, [])
