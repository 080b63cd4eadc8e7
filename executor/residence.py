"""Which storages live in the arena, for whom, and how they come back to ordinary memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow.allocator_ext import _C

ALIGNMENT = 64


def rounded(size: int) -> int:
    """Bytes that the arena counts for a tensor's storage."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the arena counts for the storages behind these tensors, each once."""
    unique = unique_storages(tensors).values()
    return sum(rounded(tensor.untyped_storage().nbytes()) for tensor in unique)


@dataclass
class _Resident:
    tensor: torch.Tensor
    former: Any
    users: set[int] = field(default_factory=set)


class Residence:
    """The persistent storages of all jobs in one arena. Tensors keep their identity throughout."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena
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
            resident = self._residents.get(key)
            if resident is None:
                former = _C.move_into_arena(tensor, self._arena, job)
                resident = self._residents[key] = _Resident(tensor, former)
            resident.users.add(job)
        self._arena.synchronize()

    def leave(self, job: int, also: Iterable[torch.Tensor] = ()) -> None:
        """Moves the job's storages back to ordinary memory, and what of `also` is in the arena."""
        for key, resident in list(self._residents.items()):
            resident.users.discard(job)
            if not resident.users:
                _C.move_out_of_arena(resident.tensor, self._arena, resident.former)
                del self._residents[key]
        for tensor in unique_storages(also).values():
            if storage_key(tensor) not in self._residents:
                _C.move_out_of_arena(tensor, self._arena)
        self._arena.synchronize()

    def repack(self) -> None:
        """Closes the gaps between persistent storages. Only while no step is under way."""
        owners = {key: min(resident.users) for key, resident in self._residents.items()}
        for resident in self._residents.values():
            _C.move_out_of_arena(resident.tensor, self._arena, resident.former)
        self._arena.synchronize()
        for key, resident in self._residents.items():
            resident.former = _C.move_into_arena(resident.tensor, self._arena, owners[key])
        self._arena.synchronize()
