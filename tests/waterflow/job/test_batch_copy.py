"""A copied batch looks the same, and nothing written to it reaches the one it was copied from."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch

from waterflow.allocator_ext import _C
from waterflow.job.batch_copy import copied

pytestmark = pytest.mark.cpu

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


class OwnDict(dict):
    pass


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        yield torch.from_numpy(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        yield value.image


def look(value):
    return [(t.dtype, t.shape, t.stride(), t.requires_grad, t.tolist()) for t in tensors_in(value)]


BATCHES = {
    "tensor": lambda: torch.randn(4, 3),
    "list": lambda: [torch.randn(4), torch.arange(4)],
    "nested": lambda: {"x": (torch.randn(4), ["a", 1, None]), "y": [torch.ones(2)]},
    "named": lambda: Pair(torch.randn(2), torch.randn(3)),
    "data class": lambda: Sample(torch.randn(2), "a"),
    "a dict of a class": lambda: OwnDict(x=torch.randn(2)),
    "array": lambda: {"x": np.arange(4.0)},
    "transposed": lambda: [torch.randn(4, 3).T, torch.randn(2, 3, 4, 5).transpose(1, 2)],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "columns": lambda: torch.randn(4, 6)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "empty": lambda: [torch.empty(0, 3), torch.empty(0)],
    "gradient": lambda: torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_copy_is_equal_and_apart(name):
    batch = BATCHES[name]()
    before = look(batch)
    twin = copied(batch)
    assert type(twin) is type(batch)
    assert look(twin) == before
    with torch.no_grad():
        for tensor in tensors_in(twin):
            if name != "expanded":  # several places are one in memory there
                tensor.add_(1)
    assert look(batch) == before


def test_what_shares_memory_does_so_in_the_copy():
    whole = torch.zeros(4)
    same, part, again = copied([whole, whole[1:], whole])
    same.add_(1)
    assert part.tolist() == [1, 1, 1]
    assert again is same
    assert whole.sum() == 0
    inner = [torch.zeros(1)]
    one, other = copied((inner, inner))
    assert one is other is not inner


def test_a_slice_of_much_is_copied_alone():
    much = torch.zeros(1 << 16, 4)
    (twin,) = copied([much[:2]])
    assert twin.untyped_storage().nbytes() == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: {"x": one}])
def test_memory_is_aligned_as_it_was(dtype, wrap):
    whole = torch.arange(70).to(dtype)
    for start in range(16):
        part = whole[start : start + 21].view(3, 7)
        (twin,) = tensors_in(copied(wrap(part)))
        assert twin.data_ptr() % 64 == part.data_ptr() % 64
        assert (twin.stride(), twin.dtype) == (part.stride(), dtype)
        assert torch.equal(twin, part)
        twin.zero_()
        assert torch.equal(whole, torch.arange(70).to(dtype))
    assert torch.equal(*map(torch.Tensor.clone, tensors_in(copied([torch.empty(0), whole[:0]]))))


def test_what_is_to_be_kept_is_the_very_one():
    own, others = torch.ones(3), torch.ones(3)
    start = others.data_ptr()
    within = _C.Addresses([start], [start + others.nbytes])
    for batch in ([own, others], {"a": own, "b": [others]}, OwnDict(a=own, b=others)):
        twins = list(tensors_in(copied(batch, within)))
        assert twins[0] is own
        assert twins[1] is not others
