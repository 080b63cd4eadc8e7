"""Which storages live in the arena, for whom, and how they come back to ordinary memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device import Device


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


def unique_storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """One tensor per non-empty storage."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            found.setdefault(storage_key(tensor), tensor)
    return found


def storage_bytes(tensors: Iterable[torch.Tensor], device: Device) -> int:
    """Bytes that an arena counts for the storages behind these tensors, each once."""
    unique = [t for t in unique_storages(tensors).values() if t.device == device.tensors]
    return sum(rounded(t.untyped_storage().nbytes(), device.alignment) for t in unique)


@dataclass
class _Resident:
    tensor: torch.Tensor
    former: Any
    users: set[int] = field(default_factory=set)


class Residence:
    """The persistent storages of all jobs in one arena. Tensors keep their identity throughout.

    Tensors that are not on the arena's device (numbers that an optimizer keeps on the host) stay
    where they are.
    """

    def __init__(self, arena: Any, device: Device) -> None:
        self._arena = arena
        self._device = device
        self._residents: dict[int, _Resident] = {}

    def users(self, tensor: torch.Tensor) -> set[int]:
        """The jobs that use the storage behind this tensor."""
        resident = self._residents.get(storage_key(tensor))
        return set() if resident is None else resident.users

    def enter(self, job: int, tensors: Iterable[torch.Tensor]) -> None:
        """Moves storages into the arena, on the job's account; shared ones only once.

        Raises:
            torch.OutOfMemoryError: they do not fit; those that moved are entered all the same.
        """
        for key, tensor in unique_storages(tensors).items():
            if tensor.device != self._device.tensors:
                continue
            resident = self._residents.get(key)
            if resident is None:
                former = _C.move_into_arena(tensor, self._arena, job)
                resident = self._residents[key] = _Resident(tensor, former)
            resident.users.add(job)
        self._arena.synchronize()

    def leave(self, job: int, also: Iterable[torch.Tensor] = ()) -> None:
        """Moves the job's storages back to ordinary memory, and what of `also` is in the arena.

        Where there is no such memory they stay: the arena lives on until they are gone.
        """
        for key, resident in list(self._residents.items()):
            resident.users.discard(job)
            if not resident.users:
                self._move_out(resident.tensor, resident.former)
                del self._residents[key]
        for tensor in unique_storages(also).values():
            here = tensor.device == self._device.tensors
            if here and storage_key(tensor) not in self._residents:
                self._move_out(tensor, None)
        self._arena.synchronize()

    def _move_out(self, tensor: torch.Tensor, former: Any) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            _C.move_out_of_arena(tensor, self._arena, former)

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets a storage that nobody needs any more: its memory goes with its last tensor."""
        self._residents.pop(storage_key(tensor), None)

    def repack(self) -> None:
        """Closes the gaps between persistent storages. Only while no step is under way.

        All moves are within the arena: a device may have no memory beside it.
        """
        self._arena.synchronize()
        end = 0
        for resident in sorted(self._residents.values(), key=self._offset):
            if self._offset(resident) > end:
                self._move_down(resident, end)
            size = rounded(resident.tensor.untyped_storage().nbytes(), self._device.alignment)
            end = self._offset(resident) + size

    def _offset(self, resident: _Resident) -> int:
        return int(self._arena.offset_of(resident.tensor.untyped_storage().data_ptr()))

    def _move_down(self, resident: _Resident, offset: int) -> None:
        tensor, job = resident.tensor, min(resident.users)
        if _C.move_within_arena(tensor, self._arena, job, offset):
            return
        # Its new place and its old one overlap: by way of a third, if there is one.
        if _C.move_within_arena(tensor, self._arena, job, None):
            _C.move_within_arena(tensor, self._arena, job, offset)
