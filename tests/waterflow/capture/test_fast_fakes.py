"""Results told by layouts alone are those of torch's own mode, and of the kernels."""

from __future__ import annotations

import functools
import unittest.mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from waterflow.capture import fast_fakes, fast_layouts, stride_rules
from waterflow.capture.fast_fakes import detached, fast_result, twin_of
from waterflow.capture.stride_rules import CaptureMode

pytestmark = pytest.mark.virtual
aten = torch.ops.aten
CHANNELS_LAST = torch.channels_last
META_BY_DEFAULT = functools.partial(torch.device, "meta")

SHAPES = [(), (1,), (5,), (3, 4), (1, 4), (4, 1), (2, 1, 3), (0, 3), (2, 3, 4, 5)]
LAYOUTS = {
    "new": lambda shape, dtype: torch.ones(shape, dtype=dtype),
    "transposed": lambda shape, dtype: torch.ones(shape[::-1], dtype=dtype).permute(
        tuple(reversed(range(len(shape))))
    ),
    "expanded": lambda shape, dtype: torch.ones((), dtype=dtype).expand(shape),
    "spread": lambda shape, dtype: torch.ones((*shape, 2), dtype=dtype)[..., 0],
}
TYPES = [torch.float32, torch.float64, torch.int64]
UNARY = [
    *("sqrt", "rsqrt", "neg", "abs", "exp", "log", "tanh", "sigmoid", "relu", "gelu", "silu"),
    *("reciprocal", "zeros_like", "ones_like", "empty_like"),
]
BINARY = ["add", "sub", "mul", "div"]
BACKWARD = ["tanh_backward", "sigmoid_backward", "gelu_backward", "threshold_backward"]
IN_PLACE = ["add_", "sub_", "mul_", "div_"]


def operand(draw, shapes=SHAPES):
    shape, layout = draw(st.sampled_from(shapes)), draw(st.sampled_from(sorted(LAYOUTS)))
    return LAYOUTS[layout](shape, draw(st.sampled_from(TYPES)))


def described(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    return [described(part) for part in value]


def outcome(function, *arguments):
    try:
        return described(function(*arguments))
    except (RuntimeError, TypeError, IndexError):
        return "an error"


def asked(mode, function, arguments):
    fakes = [
        mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments
    ]
    with mode:
        return outcome(function, *fakes)


@st.composite
def calls(draw):
    """An operator of those with a rule, and operands that it may or may not accept."""
    kind = draw(st.sampled_from(["unary", "binary", "scalar", "backward", "in place", "others"]))
    x = operand(draw)
    y = draw(st.sampled_from([x.clone(), operand(draw)]))
    if kind == "unary":
        return getattr(aten, draw(st.sampled_from(UNARY))).default, [x]
    if kind == "binary":
        return getattr(aten, draw(st.sampled_from(BINARY))).Tensor, [x, y]
    if kind == "scalar":
        return getattr(aten, draw(st.sampled_from(BINARY))).Scalar, [
            x,
            draw(st.sampled_from([2, 0.5])),
        ]
    if kind == "backward":
        name = draw(st.sampled_from(BACKWARD))
        return getattr(aten, name).default, [x, y, *([0] if "threshold" in name else [])]
    if kind == "in place":
        name = draw(st.sampled_from([*IN_PLACE, "lerp_", "addcmul_", "copy_"]))
        if name == "lerp_":
            return aten.lerp_.Scalar, [x, y, 0.5]
        if name in ("addcmul_", "copy_"):
            return getattr(aten, name).default, [x, y, y] if name == "addcmul_" else [x, y]
        return getattr(aten, name).Tensor, [x, y]
    matrices = [(3, 4), (4, 5), (4, 3), (1, 4), (4, 1)]
    a, b = operand(draw, matrices), operand(draw, matrices)
    dims = draw(st.lists(st.integers(-1, 2), max_size=2))
    return draw(
        st.sampled_from(
            [
                (aten.mm.default, [a, b]),
                (aten.addmm.default, [operand(draw, [(5,), (3, 5), (1, 5), (3,)]), a, b]),
                (aten.sum.dim_IntList, [a, dims, draw(st.booleans())]),
                (aten._log_softmax.default, [a, 1, False]),
                (aten._log_softmax_backward_data.default, [a, a.clone(), 1, a.dtype]),
            ]
        )
    )


@settings(deadline=None)
@given(calls())
def test_results_are_those_of_the_kernels(call):
    function, arguments = call
    mode = CaptureMode()
    found = asked(mode, function, arguments)
    wanted = outcome(function, *arguments)
    if found != wanted:  # torch's own mode differs from the kernel, and is asked
        with unittest.mock.patch.object(stride_rules, "fast_result", return_value=NotImplemented):
            assert found == asked(CaptureMode(), function, arguments)


@pytest.mark.parametrize("function", [aten.add.Tensor, aten.addcdiv_.default, aten.mm.default])
def test_common_operators_do_not_ask_torchs_mode(function, monkeypatch):
    mode = CaptureMode()
    tensors = [mode.from_tensor(torch.ones(3, 3)) for _ in range(3)]
    monkeypatch.setattr(FakeTensorMode, "dispatch", None)
    count = 3 if "addcdiv" in function.name() else 2
    with mode:
        result = function(*tensors[:count])
    assert isinstance(result, FakeTensor)
    assert result.shape == (3, 3)


def test_known_values_are_left_to_torchs_mode():
    """It computes with them, so that code can read them."""
    with CaptureMode() as mode:
        known = torch.tensor(3.0)
        assert known.constant is not None
        assert fast_result(mode, aten.add.Tensor, (known, known), {}) is NotImplemented
        assert float(known + 1) == 4


def test_sparse_tensors_are_left_to_torchs_mode():
    mode = CaptureMode()
    sparse = mode.from_tensor(torch.eye(3).to_sparse())
    dense = mode.from_tensor(torch.eye(3))
    with mode:
        assert fast_result(mode, aten.mul.Tensor, (sparse, 2.0), {}) is NotImplemented
        assert fast_result(mode, aten.add_.Tensor, (dense, sparse), {}) is NotImplemented
        assert (sparse * 2.0).layout == torch.sparse_coo


def test_results_belong_to_the_device_of_the_operands():
    with CaptureMode():
        there = torch.empty(2)
        assert (there + there).device == there.device


def test_a_detached_twin_shares_the_storage():
    with CaptureMode():
        tensor = torch.empty(2, 3, requires_grad=True)
    twin = detached(tensor)
    assert twin is not tensor
    assert not twin.requires_grad
    assert twin.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_strides_of_a_dimension_of_one_place_are_looked_at():
    odd = torch.ones(4).as_strided((4, 1), (1, 7))
    assert odd.is_contiguous()
    assert not fast_layouts.is_canonical(odd)


class Own(torch.Tensor):
    pass


def with_number(tensor):
    tensor.grad = torch.ones_like(tensor)
    return tensor


#: Groups of tensors; whether torch's own mode is asked for the last of them.
ORIGINALS = {
    "plain": (lambda: [torch.ones(3, 4)], False),
    "a number": (lambda: [torch.tensor(2)], False),
    "empty": (lambda: [torch.ones(0, 4)], False),
    "trained": (lambda: [torch.ones(3, 4, requires_grad=True)], False),
    "a parameter": (lambda: [nn.Parameter(torch.ones(3, 4))], False),
    "a frozen parameter": (lambda: [nn.Parameter(torch.ones(3), requires_grad=False)], False),
    "with a gradient": (lambda: [with_number(nn.Parameter(torch.ones(3)))], False),
    "types": (lambda: [torch.ones(3, dtype=t) for t in (torch.bool, torch.complex64)], False),
    "two": (lambda: [torch.ones(3), torch.ones(3)], False),
    "the same twice": (lambda: [torch.ones(3)] * 2, True),
    "of one storage": (lambda: [one := torch.ones(3), one.detach()], True),
    "data of a parameter": (lambda: [one := nn.Parameter(torch.ones(3)), one.data], True),
    "a view": (lambda: [torch.ones(12).view(3, 4)], True),
    "an offset": (lambda: [torch.ones(6)[3:].detach()], True),
    "the beginning": (lambda: [torch.ones(6)[:3].detach()], True),
    "transposed": (lambda: [torch.ones(3, 4).t().detach()], True),
    "expanded": (lambda: [torch.ones(()).expand(3).detach()], True),
    "of odd strides": (lambda: [torch.empty_strided((4, 1), (1, 7))], True),
    "channels last": (lambda: [torch.ones(2, 3, 4, 4).to(memory_format=CHANNELS_LAST)], True),
    "a result": (lambda: [torch.ones(3, requires_grad=True) * 2], True),
    "conjugated": (lambda: [torch.ones(3, dtype=torch.complex64).conj()], True),
    "of a buffer's class": (lambda: [nn.Buffer(torch.ones(3))], True),
    "of inference": (lambda: [torch.inference_mode()(torch.ones)(3)], True),
    "of a class": (lambda: [torch.ones(3).as_subclass(Own)], True),
    "sparse": (lambda: [torch.eye(3).to_sparse()], True),
    "resized": (lambda: [torch.ones(3).resize_(2)], True),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_twins_are_those_of_torchs_mode(name, monkeypatch):
    make, is_asked = ORIGINALS[name]
    originals = make()
    mode, theirs = CaptureMode(), CaptureMode()
    twins = [twin_of(mode, each) for each in originals]
    expected = [theirs.from_tensor(each, static_shapes=True) for each in originals]

    def layout(fake):
        where = None
        if fake.layout is torch.strided:
            where = (fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes())
        return (
            *(type(fake), fake.shape, where, fake.dtype, fake.device),
            *(fake.requires_grad, fake.is_leaf, fake.is_conj(), fake.is_inference()),
            *(isinstance(fake, kind) for kind in (nn.Parameter, nn.Buffer)),
        )

    def groups(fakes):
        if any(fake.layout is not torch.strided for fake in fakes):
            return None
        storages = [fake.untyped_storage()._cdata for fake in fakes]
        return [[id(a) == id(b) for b in fakes] for a in fakes], [
            [a == b for b in storages] for a in storages
        ]

    assert list(map(layout, twins)) == list(map(layout, expected))
    assert groups(twins) == groups(expected)
    for original, twin in zip(originals, twins, strict=True):
        assert mode.from_tensor(original, static_shapes=True) is twin  # it knows it again
    asked = []
    monkeypatch.setattr(CaptureMode, "from_tensor", lambda *_, **__: asked.append(True))
    fresh = CaptureMode()
    for each in originals:
        asked.clear()
        twin_of(fresh, each)
    assert bool(asked) == is_asked


def test_a_view_that_comes_later_is_of_the_same_storage():
    mode, whole = CaptureMode(), torch.ones(3, 4)
    twin, part = twin_of(mode, whole), twin_of(mode, whole[1])
    assert twin.untyped_storage()._cdata == part.untyped_storage()._cdata


@pytest.mark.parametrize(
    "scope", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")]
)
def test_twins_are_the_same_wherever_they_are_made(scope):
    fast_fakes._plain_keys.cache_clear()
    original = nn.Parameter(torch.ones(3))
    with scope():
        twin_of(CaptureMode(), original)  # what is asked only once is asked here
        twin = twin_of(CaptureMode(), original)
    assert twin.requires_grad
    assert not twin.is_inference()
    assert twin.device == original.device
