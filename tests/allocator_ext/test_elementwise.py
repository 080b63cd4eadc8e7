"""Small elementwise operators that a tape runs by itself: PyTorch's bits, whatever the size."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.graphs import step_of
from waterflow.executor.run.tape import compile_step
from waterflow.steps.same_bits import same_bits

pytestmark = pytest.mark.cpu

aten = torch.ops.aten
SPECIAL = [0.0, -0.0, 1e-41, -1e-45, float("inf"), -float("inf"), float("nan"), 3e38, -1.5]


def every_operator(x, y, z):
    """Each operator in each of its forms; none reads what another one made."""
    products = [x + y, x.sub(y, alpha=0.3), x * y, x / y, x * 0.1, x + 3, x / 7.7]
    curves = [x.sqrt(), x.sigmoid(), x.tanh()]
    curves += [aten.sigmoid_backward(x, y), aten.tanh_backward(x, y)]
    sums = [torch.addcmul(x, y, z, value=0.3), torch.addcdiv(x, y, z, value=-0.7)]
    sums += [torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.9)]
    in_place = [x.clone().add_(y, alpha=0.7), x.clone().mul_(0.999), x.clone().sub_(y)]
    in_place += [x.clone().div_(y), x.clone().mul_(y), x.clone().add_(1e-8)]
    in_place += [x.clone().addcmul_(y, z, value=0.001), x.clone().addcdiv_(y, z, value=-0.01)]
    in_place += [
        x.clone().lerp_(y, 0.1),
        x.clone().sqrt_(),
        x.clone().sigmoid_(),
        x.clone().tanh_(),
    ]
    return (x.sum(), *products, *curves, *sums, *in_place)


def numbers(*shape):
    """Random numbers of all magnitudes, with special ones among them."""
    values = torch.randn(shape) * 10.0 ** torch.randint(-6, 6, shape)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < 0.2, special, values)


def results(compiled, *tensors):
    compiled.tape.set_batch(list(tensors))
    compiled.tape.run(0, len(compiled.tape))
    return [compiled.tape.slot(slot) for slot in compiled.outputs.values()]


def check(function, *shapes, runs=3):
    """The first run dispatches and compares, the others need not."""
    compiled = compile_step(step_of(function, *(numbers(*shape) for shape in shapes)))
    for _ in range(runs):
        tensors = [numbers(*shape) for shape in shapes]
        expected = function(*tensors)[1:]
        found = results(compiled, *tensors)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.stride() == other.stride()
            assert same_bits(one, other), f"result {place} of {shapes}"
    return compiled


@pytest.mark.parametrize("first", range(1, 65, 16))
def test_every_size_has_the_bits_of_the_dispatched_operators(first):
    torch.manual_seed(first)
    for size in range(first, first + 16):
        check(every_operator, (size,), (size,), (size,))


@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 16), (16,), (1, 16)],  # broadcast
        [(3, 5, 7), (3, 5, 7), ()],
        [(300, 300), (300, 300), (300, 300)],  # too large to be worth it
        [(0,), (0,), (0,)],
        [(), (), ()],
    ],
)
def test_other_operands_are_dispatched_or_served_with_the_same_bits(shapes):
    torch.manual_seed(0)
    check(every_operator, *shapes)


def transposed(x, y):
    a, b = x.t(), y.t()
    return x.sum(), a * b, a + y.t(), a.clone().mul_(b), (x[:, 1:] * y[:, 1:]), x * y.t().t()


def test_other_layouts_stay_what_they_are():
    check(transposed, (6, 9), (6, 9))


def of_other_types(x, y):
    half, double = x.to(torch.bfloat16), x.double()
    whole = y.nan_to_num(0, 0, 0).clamp(-5, 5).long()
    return x.sum(), half * 0.1, half.clone().add_(0.1), double * 0.1, whole * 3, x * whole, half + x


def test_other_types_are_dispatched():
    check(of_other_types, (33,), (33,))


def read_while_written(x):
    a, b = x.clone(), x.clone()
    return x.sum(), a.mul_(a), b[1:].add_(1.0), b


def test_an_operand_that_is_overwritten_is_dispatched():
    check(read_while_written, (40,))


def dispatched(compiled, *tensors):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        results(compiled, *tensors)
    return [event.name for event in recorded.events() if event.name.startswith("aten::")]


def test_the_dispatcher_is_asked_once():
    def update(x, y):
        return x.t().sum(), x.clone().mul_(0.9).addcdiv_(y, y, value=0.1), x.t() + y.t()

    compiled = compile_step(step_of(update, numbers(4, 4), numbers(4, 4)))
    first = dispatched(compiled, numbers(4, 4), numbers(4, 4))
    later = dispatched(compiled, numbers(4, 4), numbers(4, 4))
    gone = {"aten::mul_", "aten::addcdiv_", "aten::add", "aten::t"}
    assert gone <= set(first)
    assert not gone & set(later)
    assert "aten::sum" in later


def test_a_layout_that_changes_is_made_out_anew():
    """A batch comes in another layout than the one the tape has seen: nothing of before is used."""

    def step(x):
        return x.sum(), x.t() + 0.0, x * 2.0, x.select(0, 1)

    compiled = compile_step(step_of(step, torch.ones(3, 5)))
    for batch in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(3, 5)):
        for found, expected in zip(results(compiled, batch), step(batch)[1:], strict=True):
            assert found.stride() == expected.stride()
            assert torch.equal(found, expected)
