"""Values go through JSON and tensors and come back, bit for bit and of the same type."""

import json
import math
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from waterflow.checkpoint.values import (
    DamagedValueError,
    NotExpressibleError,
    Packer,
    Unpacker,
)

pytestmark = pytest.mark.cpu


def there_and_back(value):
    packer = Packer()
    packed = json.loads(json.dumps(packer.pack(value, "it"), allow_nan=False))
    return Unpacker(packer.copies(), torch.device("cpu")).unpack(packed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1 << 200,
        -0.0,
        0.1 + 0.2,
        5e-324,
        math.inf,
        -math.inf,
        "text \ud800 \0",
        (1, (2.5, [None])),
        {"a": {"b": (1,)}, "c": []},
        {1: "a", (2, 3): "b", "$": "tag"},
        {"$": "tuple", "items": [1]},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({3: 2, 8: 1}),
        deque([1, 2], maxlen=3),
        {1, 2},
        frozenset({1}),
        1 + 2j,
        b"\x00\xff",
        torch.Size((2, 3)),
        torch.bfloat16,
        np.float32(0.1),
        np.uint64(2**63),
        (3, tuple(range(625)), None),
    ],
)
def test_plain_values(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_not_a_number():
    assert math.isnan(there_and_back({"best": [math.nan]})["best"][0])


def test_order_of_keys_stays():
    assert list(there_and_back({"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.randn(2, 3).t(),
        torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3).bfloat16(),
        torch.tensor([math.nan, -0.0, math.inf]),
        torch.tensor([1 + 2j]),
        torch.tensor([1.5]).to(torch.float8_e4m3fn),
        torch.arange(10)[::2],
        torch.zeros(3).expand(2, 3),
    ],
)
def test_tensors(tensor):
    found = there_and_back([tensor])[0]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found, tensor)]
    assert bits[0].equal(bits[1])
    if 0 not in tensor.stride():
        assert found.stride() == tensor.stride()


def test_arrays():
    array = np.arange(6, dtype=np.uint32).reshape(2, 3).T
    found = there_and_back(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_what_was_copied_no_longer_changes():
    tensor, packer = torch.zeros(3), Packer()
    packer.pack({"x": tensor}, "it")
    copies = packer.copies()
    tensor += 1
    assert copies["it.x"].equal(torch.zeros(3))


class Own:
    """An object as users have them."""


def loop():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"fn": print}, r"it\.fn is a builtins\.builtin_function_or_method"),
        ([1, Own()], r"it\.1 is a .*Own"),
        (loop(), "it holds itself"),
        (np.array([object()]), "array of object"),
        ({"s": torch.eye(2).to_sparse()}, r"it\.s is a tensor of layout torch\.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"it\.m has no values"),
    ],
)
def test_what_cannot_be_kept_is_named(value, where):
    with pytest.raises(NotExpressibleError, match=where):
        there_and_back(value)


def test_foreign_values_are_refused():
    unpacker = Unpacker({"bytes": torch.zeros(8, dtype=torch.uint8)}, torch.device("cpu"))
    for packed in (
        {"$": "os.system"},
        {"$": "tensor", "name": "x"},
        {"$": "dtype", "is": "load"},
        {"$": "array", "name": "bytes", "dtype": "|O", "shape": [1]},
    ):
        with pytest.raises(DamagedValueError):
            unpacker.unpack(packed)
