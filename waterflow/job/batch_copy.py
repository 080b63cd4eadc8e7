"""Copies of batches, to be written to without anybody else's batch changing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

#: Values that nobody can write to.
_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def copied(batch: Any) -> Any:
    """The same batch in memory of its own, its tensors laid out as they are.

    What shared memory within the batch does so in the copy, too.
    """
    parts = list(_parts(batch))
    if len(set(parts)) < len(parts):
        return copy.deepcopy(batch)
    return _copied(batch)


def _parts(value: Any) -> Iterator[int]:
    """What can be written to: memory and containers, each as often as it occurs."""
    if type(value) is torch.Tensor:
        if value.layout is torch.strided and value.numel():
            yield value.untyped_storage()._cdata
    elif type(value) in (list, tuple):
        yield from (id(value),) if type(value) is list else ()
        for item in value:
            yield from _parts(item)
    elif type(value) is dict:
        yield id(value)
        for item in value.values():
            yield from _parts(item)
    elif type(value) not in _CONSTANT:
        yield id(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is torch.Tensor and _is_plain(value):
        twin = value.clone()
        return twin if twin.stride() == value.stride() else copy.deepcopy(value)
    if kind in (list, tuple):
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value if kind in _CONSTANT else copy.deepcopy(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.requires_grad and not lazy
