"""Storages behind tensors: which are the same, and what an arena counts for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from waterflow.executor.device.base import Device


def rounded(size: int, alignment: int) -> int:
    """Bytes that an arena of this alignment counts for a storage."""
    return -(-size // alignment) * alignment


def span_of(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor's strides cover, as one row."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.detach().as_strided((length,), (1,))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor; equal for views of one another."""
    return tensor.untyped_storage()._cdata


def by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """The distinct tensors that share each non-empty storage."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, {})[id(tensor)] = tensor
    return {key: list(sharing.values()) for key, sharing in found.items()}


def unique_storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """One tensor per non-empty storage."""
    return {key: sharing[0] for key, sharing in by_storage(tensors).items()}


def storage_bytes(tensors: Iterable[torch.Tensor], device: Device) -> int:
    """Bytes that an arena counts for the storages behind these tensors, each once."""
    storages = [t.untyped_storage() for t in tensors if t.device == device.tensors]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(rounded(size, device.alignment) for size in sizes.values())


def over(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor's twin over another storage."""
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        twin = torch._conj(twin) if tensor.is_conj() else twin
        return torch._neg_view(twin) if tensor.is_neg() else twin
