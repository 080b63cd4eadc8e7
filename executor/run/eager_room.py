"""Room in the budget for one job's eager steps, so that they can run beside other jobs' steps.

What an eager step asks for is known only when it asks. So as much of the budget as its largest step
so far has needed is set aside while jobs flow, and its tensors come from an arena of their own that
never holds more than that. A step that needs more waits until no captured step is under way, and
then sets more aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device.storages import rounded
from waterflow.executor.run.lanes import Lanes

#: More is set aside than the largest step so far has needed: a part of it, or so many bytes.
_SPARE, _LEAST_SPARE = 1 / 8, 64 << 10


#: Addresses of a room, as a multiple of the budget: what it holds is limited by bytes, and gaps
#: between tensors of steps that nobody has planned are not to end a job.
_ADDRESSES = 4

#: Gaps in the budget that one room may fill at once.
_MOST_PIECES = 64


def _ample(need: int) -> int:
    return need + max(int(need * _SPARE), _LEAST_SPARE)


class Room(Protocol):
    """Where an eager step's tensors come from."""

    @property
    def size(self) -> int:
        """Bytes of the budget that are set aside for it."""

    def grow(self, size: int) -> bool:
        """Enlarges it by at least so many bytes in one piece; whether it could."""


class OpenRoom:
    """All that nobody holds of the budget, while no step but one is under way: others' memory is
    what it grows by."""

    def __init__(self, lanes: Lanes) -> None:
        self._arena = lanes.arena
        self.size = 0

    def grow(self, size: int) -> bool:
        """Whether so many bytes are free in one piece."""
        self._arena.synchronize()
        wanted = rounded(size, self._arena.alignment)
        return int(self._arena.statistics().largest_free) >= wanted


class EagerRoom:
    """The room of one job; one thread at a time works in it."""

    def __init__(self, lanes: Lanes, job: int) -> None:
        self._budget = lanes.arena
        self._job = job
        self._blocks: list[int] = []
        self.size = 0
        self._former_peak = 0  # before something that steps have made was kept
        self._begin()

    def _begin(self) -> None:
        self._arena: Any = _C.Arena.host(_ADDRESSES * int(self._budget.statistics().capacity), 1)
        _C.register_arena(self._arena)
        self._arena.set_limit(self._job, 0)

    def _begin_anew(self) -> None:
        """With more addresses, where the budget has grown and nothing lies here."""
        before, after = self._arena.statistics().capacity, self._budget.statistics().capacity
        if before < _ADDRESSES * after and not self._arena.held(self._job):
            self._former_peak = self.peak
            _C.retire_arena(self._arena)
            self._begin()

    @property
    def is_open(self) -> bool:
        """Whether memory is set aside for it."""
        return bool(self._blocks)

    @property
    def peak(self) -> int:
        """The most bytes that steps in it have held, and will not have kept for good."""
        return max(self._former_peak, int(self._arena.peak(self._job)))

    def note_kept(self, size: int) -> None:
        """So many of the bytes that steps in it have made have a place of their own now: the next
        step finds them there."""
        self._former_peak = max(self._former_peak, int(self._arena.peak(self._job)) - size)
        self._arena.reset_peaks()

    @property
    def allocations(self) -> int:
        """Tensors that steps in it have made so far."""
        return int(self._arena.statistics().allocations)

    def open(self, need: int, left: int) -> bool:
        """Sets memory aside, unless others would have too little left. Between steps only.

        Args:
            need: bytes of the largest step so far.
            left: bytes that have to remain in one piece.

        Returns:
            Whether the room is open.
        """
        held = int(self._arena.held(self._job))
        least = max(need, self.peak, held)
        is_limited = self._budget.limit(self._job) is not None  # perhaps to no more than it needs
        self.close()
        self._begin_anew()
        if not (self._add(max(_ample(need), least)) or (is_limited and self._add(least))):
            return False
        if int(self._budget.statistics().capacity) - int(self._budget.live_end) < left:
            self.close()
        return self.is_open

    def _add(self, size: int) -> bool:
        """Sets so many bytes more aside, in as many pieces as there are gaps: they are counted, and
        nothing lies in them."""
        missing, added = rounded(max(size, 1), self._budget.alignment), list[int]()
        while missing > 0 and len(added) < _MOST_PIECES:
            piece = min(missing, int(self._budget.statistics().largest_free))
            block = self._budget.allocate(piece, 0, self._job) if piece else None
            if block is None:
                break
            added.append(block)
            missing -= piece
        if missing > 0:
            self._give_back(added)
            return False
        self._blocks += added
        self.size += max(size, 1)
        self._arena.set_limit(self._job, self.size)
        return True

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._budget.free(block, 0)
        if blocks:
            self._budget.synchronize()

    def close(self) -> None:
        """Gives its memory back. Between steps only."""
        self._give_back(self._blocks)
        self._blocks, self.size = [], 0
        self._arena.set_limit(self._job, 0)

    def grow(self, size: int) -> bool:
        """Enlarges the room by at least `size` bytes, while no captured step is under way."""
        self._budget.synchronize()  # what lanes have given up is free for all
        wanted = int(self._arena.held(self._job)) + rounded(size, self._arena.alignment)
        if wanted <= self.size:  # something has been let go of
            return True
        return any(self._add(to - self.size) for to in (max(wanted, _ample(self.size)), wanted))

    def scope(self, more: Callable[[int], bool]) -> Any:
        """Inside, the calling thread's tensors come from here.

        Args:
            more: called with a size that there is no room for; whether there is now.
        """
        return _C.LaneScope(self._arena, 0, self._job, more, self._budget)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives those of these tensors that live here ordinary memory: callbacks may keep views."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                _C.move_out_of_arena(tensor, self._arena)

    def retire(self) -> None:
        """The job has ended: of the arena only what tensors still hold lives on."""
        self.close()
        _C.retire_arena(self._arena)
