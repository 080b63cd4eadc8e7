"""Copies of batches, to be written to without anybody else's batch changing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, ValuesView
from typing import Any

import torch

from waterflow.allocator_ext import _C

#: All memory.
_EVERYWHERE = _C.Addresses([0], [1 << 63])
#: Values that nobody can write to.
_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def copied(batch: Any, within: _C.Addresses | None = None) -> Any:
    """The same batch in memory of its own, its tensors laid out and aligned as they are: kernels
    may sum in another order where memory is aligned otherwise.

    What shared memory within the batch does so in the copy, too.

    Args:
        batch: any.
        within: where tensors lie that are to be copied; of others the copy holds the very ones.
            None: anywhere.
    """
    made = (within or _EVERYWHERE).copied_from(batch)
    if made is not None:
        return made
    parts = list(_parts(batch))
    if len(set(parts)) < len(parts):
        return _deep(batch, within)
    return _copied(batch, within)


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


def _copied(value: Any, within: _C.Addresses | None) -> Any:
    kind = type(value)
    if kind is torch.Tensor and _is_plain(value):
        if _is_elsewhere(value, within):
            return value
        twin = _C.aligned_clone(value) if value.is_contiguous() else value.clone()
        return twin if twin.stride() == value.stride() else copy.deepcopy(value)
    if kind in (list, tuple):
        return kind(_copied(item, within) for item in value)
    if kind is dict:
        return {key: _copied(item, within) for key, item in value.items()}
    return value if kind in _CONSTANT else _deep(value, within)


def _is_elsewhere(tensor: torch.Tensor, within: _C.Addresses | None) -> bool:
    return within is not None and not within.meet(tensor)


def _deep(value: Any, within: _C.Addresses | None) -> Any:
    kept = {id(tensor): tensor for tensor in _tensors(value) if _is_elsewhere(tensor, within)}
    return copy.deepcopy(value, kept)


def _tensors(value: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        within = value.values() if isinstance(value, Mapping) else value
        if not isinstance(within, (list, tuple, ValuesView)):
            within = getattr(value, "__dict__", {}).values()
        for item in within:
            yield from _tensors(item, depth - 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.requires_grad and not lazy
