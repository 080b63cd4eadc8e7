"""Room in the budget for one job's eager steps, so that they can run beside other jobs' steps.

What an eager step asks for is known only when it asks. So a block of the budget as large as its
largest step so far is set aside while jobs flow, and its tensors come from an arena of their own
that never holds more than that block. A step that needs more waits until no captured step is under
way, and then enlarges the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.common.text import printable
from waterflow.executor.device.storages import rounded
from waterflow.executor.run.lanes import Lanes

#: The block is larger than the largest step so far by a part of it, or so many bytes.
_SPARE, _LEAST_SPARE = 1 / 8, 64 << 10


#: Addresses of a room, as a multiple of the budget: what it holds is limited by bytes, and gaps
#: between tensors of steps that nobody has planned are not to end a job.
_ADDRESSES = 4


def _ample(need: int) -> int:
    return need + max(int(need * _SPARE), _LEAST_SPARE)


class EagerRoom:
    """The room of one job; one thread at a time works in it."""

    def __init__(self, lanes: Lanes, job: int, name: str) -> None:
        self._budget = lanes.arena
        self._job = job
        self._block: int | None = None
        self._size = 0
        self._arena: Any = _C.Arena.host(_ADDRESSES * lanes.budget, 1)
        _C.register_arena(self._arena)
        _C.set_job_name(self._arena, job, printable(name))
        self._arena.set_limit(job, 0)

    @property
    def is_open(self) -> bool:
        """Whether its block is set aside."""
        return self._block is not None

    @property
    def peak(self) -> int:
        """The most bytes that steps in it have held."""
        return int(self._arena.peak(self._job))

    @property
    def allocations(self) -> int:
        """Tensors that steps in it have made so far."""
        return int(self._arena.statistics().allocations)

    def open(self, need: int, left: int) -> bool:
        """Sets the block aside, unless others would have too little left. Between steps only.

        Args:
            need: bytes of the largest step so far.
            left: bytes that have to remain in one piece.

        Returns:
            Whether the room is open.
        """
        held = int(self._arena.held(self._job))
        size = max(_ample(need), self.peak, held)
        if not self._take(size):
            return False
        if int(self._budget.statistics().capacity) - int(self._budget.live_end) < left:
            self.close()
        return self.is_open

    def _take(self, size: int) -> bool:
        self.close()
        self._block = self._budget.allocate(max(size, 1), 0, self._job)
        self._size = size if self.is_open else 0
        self._arena.set_limit(self._job, self._size)
        return self.is_open

    def close(self) -> None:
        """Gives the block back. Between steps only."""
        if self._block is not None:
            self._budget.free(self._block, 0)
            self._budget.synchronize()
            self._block = None
            self._arena.set_limit(self._job, 0)

    def grow(self, size: int) -> bool:
        """Enlarges the block by at least `size` bytes, while no captured step is under way."""
        former = self._size
        wanted = int(self._arena.held(self._job)) + rounded(size, self._arena.alignment)
        if self._take(max(wanted, _ample(former))) or self._take(wanted):
            return True
        self._take(former)
        return False

    def scope(self, more: Callable[[int], bool]) -> Any:
        """Inside, the calling thread's tensors come from here.

        Args:
            more: called with a size that the block has no room for; whether it has room now.
        """
        return _C.LaneScope(self._arena, 0, self._job, more)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives those of these tensors that live here ordinary memory: callbacks may keep views."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                _C.move_out_of_arena(tensor, self._arena)

    def retire(self) -> None:
        """The job has ended: of the arena only what tensors still hold lives on."""
        self.close()
        _C.retire_arena(self._arena)
