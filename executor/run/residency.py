"""Which storages have their place in the arena, for whom, and whether their bytes are there.

On a device that keeps tensors in place, users' tensors never get another address: the arena only
reserves room for them, so that budgets and plans count them. Elsewhere the bytes move in and back,
save those whose address somebody else may know.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device.base import Device
from waterflow.executor.device.storages import by_storage, rounded, storage_key

#: Gaps between persistent storages are closed, unasked, where they are more of the arena than this.
_SPARSE = 1 / 16


@dataclass
class _Resident:
    tensor: torch.Tensor  # of our own: it keeps the storage, whatever users do with theirs
    room: Any  # reserved in the arena; None where the storage itself is there
    users: set[int] = field(default_factory=set)


class Residency:
    """The persistent storages of all jobs in one arena. Tensors keep their identity throughout.

    Tensors that are not on the arena's device (numbers that an optimizer keeps on the host) are
    not counted. It has no lock of its own: only the engine's thread uses it, or a lane while no
    other thread does any Python of the engine's.
    """

    def __init__(self, arena: Any, device: Device) -> None:
        self._arena = arena
        self._device = device
        self._residents: dict[int, _Resident] = {}
        self._of_job: dict[int, set[int]] = defaultdict(set)  # the keys of what each job uses

    def held(self, job: int) -> int:
        """Bytes of the arena on the job's account."""
        return int(self._arena.held(job))

    def peak(self, job: int) -> int:
        """The most bytes of the arena that were on the job's account at once."""
        return int(self._arena.peak(job))

    def users(self, tensor: torch.Tensor) -> set[int]:
        """The jobs that use the storage behind this tensor."""
        resident = self._residents.get(storage_key(tensor))
        return set() if resident is None else resident.users

    def move_in(self, job: int, tensors: Iterable[torch.Tensor]) -> None:
        """Gives storages their place in the arena, on the job's account; shared ones only once.

        What a step has made in the arena is brought out, where tensors are kept in place, and its
        place is reserved.

        Raises:
            torch.OutOfMemoryError: they do not fit; those that did are moved in all the same.
        """
        for key, sharing in by_storage(tensors).items():
            if sharing[0].device != self._device.tensors:
                continue
            resident = self._residents.get(key)
            if resident is None:
                resident = self._residents[key] = self._place(job, sharing)
            resident.users.add(job)
            self._of_job[job].add(key)
        self._arena.synchronize()

    def keep_only(self, job: int, tensors: Iterable[torch.Tensor]) -> None:
        """Moves these in and forgets all other storages of the job: nobody needs them any more.

        Raises:
            torch.OutOfMemoryError: see `move_in`.
        """
        remaining = by_storage(tensors)
        new = [t for sharing in remaining.values() for t in sharing if job not in self.users(t)]
        if new:
            self.move_in(job, new)
        for key in self._of_job[job] - remaining.keys():
            self._discard(key, job)

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether the storage behind this tensor has a place in the arena."""
        return storage_key(tensor) in self._residents or self._is_inside(tensor)

    def _discard(self, key: int, job: int) -> _Resident | None:
        """The job does not use it any more; returns what it was, None where it has been dropped."""
        self._of_job[job].discard(key)
        resident = self._residents.get(key)
        if resident is not None:
            resident.users.discard(job)
            if not resident.users:
                del self._residents[key]
        return resident

    def _place(self, job: int, sharing: list[torch.Tensor]) -> _Resident:
        tensor, room = sharing[0], None
        if self._device.keeps_in_place or not (self._is_inside(tensor) or _C.may_move(sharing)):
            room = _C.keep_in_place(tensor, self._arena, job)
        else:
            _C.move_into_arena(tensor, self._arena, job)
        return _Resident(tensor.detach(), room)

    def move_out(
        self,
        job: int,
        own: Iterable[torch.Tensor] = (),
        known: Iterable[torch.Tensor] = (),
        *,
        park: bool = False,
    ) -> None:
        """Gives up the job's places; what of its tensors is in the arena moves to ordinary memory.

        A storage stays, and the arena lives on until it is gone, where there is no such memory, or
        where the device moves tensors and somebody else may know the address.

        Args:
            job: the job.
            own: tensors of the job, which may have been made in the arena since.
            known: tensors that the user's code keeps, which may stay unless the device moves them.
            park: the device's own memory is to be free; see `park`.
        """
        inside = list(own)
        for key in list(self._of_job[job]):
            resident = self._discard(key, job)
            if resident is not None and resident.room is None:
                inside.append(resident.tensor)
        del self._of_job[job]
        if not self._device.keeps_in_place:
            inside += known
        leaving = [
            sharing
            for key, sharing in by_storage(inside).items()
            if key not in self._residents and sharing[0].device == self._device.tensors
        ]
        if park and not self._device.keeps_in_place:
            self._park([sharing for sharing in leaving if self._is_inside(sharing[0])])
        for sharing in leaving:
            self._move_out(sharing)
        self._arena.synchronize()

    def _move_out(self, sharing: list[torch.Tensor]) -> None:
        if not self._is_inside(sharing[0]):
            return
        if self._device.keeps_in_place or _C.may_move(sharing):
            with contextlib.suppress(torch.OutOfMemoryError):
                _C.move_out_of_arena(sharing[0], self._arena)

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Has the bytes of these tensors lie in page-locked host memory, where the device can read
        them all the same: nobody needs them soon. Not where the device keeps tensors in place.

        A storage stays where it is where somebody else may know its address, or where there is no
        such memory.
        """
        if self._device.keeps_in_place:
            return
        here = [
            sharing
            for sharing in by_storage(tensors).values()
            if sharing[0].device == self._device.tensors and not _C.is_parked(sharing[0])
        ]
        self._park([[*sharing, *self._own_names(sharing[0])] for sharing in here])

    def _own_names(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        resident = self._residents.get(storage_key(tensor))
        return [] if resident is None else [resident.tensor]

    def _park(self, storages: Sequence[list[torch.Tensor]]) -> None:
        """All in one piece of memory, since to lock pages takes its time."""
        movable = [sharing[0] for sharing in storages if _C.may_move(sharing)]
        if not movable:
            return
        try:
            memory = self._device.pinned(_C.parked_bytes(movable))
        except RuntimeError:  # so many pages cannot be locked
            return
        _C.park(movable, memory, self._arena)

    def unpark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Brings tensors that are parked to the device's ordinary memory: their job has ended.

        One stays, and its page-locked memory with it, where there is no room, or where somebody
        else may know its address.
        """
        for sharing in by_storage(tensors).values():
            if _C.is_parked(sharing[0]) and _C.may_move(sharing):
                with contextlib.suppress(RuntimeError):
                    _C.unpark(sharing[0], self._arena)

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

    def repack_if_sparse(self) -> None:
        """The same where the gaps are a good part of the arena: it looks at all jobs' tensors."""
        statistics = self._arena.statistics()
        gaps = int(self._arena.live_end) - int(statistics.live)
        if gaps > int(statistics.capacity) * _SPARSE:
            self.repack()

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        try:
            pointer = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # zeros that autograd knows of without memory
            return False
        return bool(self._arena.owns(pointer))

    def _offset(self, resident: _Resident) -> int:
        if resident.room is not None:
            return int(resident.room.offset)
        return int(self._arena.offset_of(resident.tensor.untyped_storage().data_ptr()))

    def _move_down(self, resident: _Resident, offset: int) -> None:
        tensor, job = resident.tensor, min(resident.users)
        if resident.room is not None:
            resident.room.move(offset, job)
            return
        if _C.move_within_arena(tensor, self._arena, job, offset):
            return
        # Its new place and its old one overlap: by way of a third, if there is one.
        if _C.move_within_arena(tensor, self._arena, job, None):
            _C.move_within_arena(tensor, self._arena, job, offset)
