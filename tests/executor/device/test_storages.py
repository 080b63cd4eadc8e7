"""Storages behind tensors: which are the same, and what an arena counts for them."""

from __future__ import annotations

import pytest
import torch

from waterflow.executor.device.host import HostDevice
from waterflow.executor.device.storages import (
    by_storage,
    rounded,
    span_of,
    storage_bytes,
    storage_key,
    unique_storages,
)

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_rounding(size: int, expected: int) -> None:
    assert rounded(size, 64) == expected


def test_views_share_a_storage_and_copies_do_not() -> None:
    tensor = torch.arange(12.0)
    assert storage_key(tensor[3:]) == storage_key(tensor.view(3, 4)) == storage_key(tensor)
    assert storage_key(tensor.clone()) != storage_key(tensor)


def test_tensors_by_storage_each_once() -> None:
    tensor, other = torch.arange(12.0), torch.ones(3)
    view = tensor[2:]
    found = by_storage([tensor, other, view, tensor, torch.empty(0)])
    assert [[id(t) for t in sharing] for sharing in found.values()] == [
        [id(tensor), id(view)],
        [id(other)],
    ]
    assert next(iter(unique_storages([view, tensor, other]).values())) is view


def test_bytes_count_whole_storages_once_and_only_those_of_the_device() -> None:
    tensor = torch.arange(20.0)
    tensors = [tensor[:1], tensor, torch.ones(1), torch.empty(9, device="meta")]
    assert storage_bytes(tensors, HostDevice()) == 128 + 64


@pytest.mark.parametrize(
    ("view", "span"),
    [
        (lambda x: x, list(range(12))),
        (lambda x: x.view(3, 4)[:, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (lambda x: x[5:6].expand(7), [5]),
        (lambda x: x.view(3, 4).t(), list(range(12))),
        (lambda x: x[:0], []),
    ],
)
def test_the_span_is_all_that_the_strides_cover(view, span) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.arange(12.0)
    found = span_of(view(tensor))
    assert found.tolist() == span
    if span:
        assert storage_key(found) == storage_key(tensor)
