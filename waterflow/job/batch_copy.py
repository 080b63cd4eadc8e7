"""Copies of batches, to be written to without anybody else's batch changing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import torch

from waterflow.allocator_ext import _C

#: To which torch aligns memory of its own.
_ALIGNMENT = 64
#: Values that nobody can write to.
_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def copied(batch: Any, keep: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
    """The same batch in memory of its own, its tensors laid out and aligned as they are: kernels
    may sum in another order where memory is aligned otherwise.

    What shared memory within the batch does so in the copy, too.

    Args:
        batch: any.
        keep: of which tensors the copy is to hold the very ones.
    """
    if type(batch) in (list, tuple) and _are_apart(batch):
        return type(batch)([one if keep(one) else _aligned_clone(one) for one in batch])
    parts = list(_parts(batch))
    if len(set(parts)) < len(parts):
        return _deep(batch, keep)
    return _copied(batch, keep)


def _are_apart(batch: Sequence[Any]) -> bool:
    """Whether a batch is of plain tensors in one piece each, that share no memory."""
    if not all(type(one) is torch.Tensor and _C.has_plain_rows(one) for one in batch):
        return False
    return len({one.untyped_storage()._cdata for one in batch}) == len(batch)


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


def _copied(value: Any, keep: Callable[[torch.Tensor], bool]) -> Any:
    kind = type(value)
    if kind is torch.Tensor and _is_plain(value):
        if keep(value):
            return value
        twin = _aligned_clone(value) if value.is_contiguous() else value.clone()
        return twin if twin.stride() == value.stride() else copy.deepcopy(value)
    if kind in (list, tuple):
        return kind(_copied(item, keep) for item in value)
    if kind is dict:
        return {key: _copied(item, keep) for key, item in value.items()}
    return value if kind in _CONSTANT else _deep(value, keep)


def _aligned_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in one piece."""
    skew = tensor.data_ptr() % _ALIGNMENT
    if not skew or skew % tensor.element_size():
        return tensor.clone()
    room = torch.empty(tensor.nbytes + _ALIGNMENT, dtype=torch.uint8, device=tensor.device)
    start = (skew - room.data_ptr()) % _ALIGNMENT
    twin = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return twin.copy_(tensor)


def _deep(value: Any, keep: Callable[[torch.Tensor], bool]) -> Any:
    kept = {id(tensor): tensor for tensor in _tensors(value) if keep(tensor)}
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
