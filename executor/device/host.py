"""The CPU as a device."""

from __future__ import annotations

from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.common.machine import MemoryLimit, machine_memory, memory_limit
from waterflow.executor.device.base import Device, cannot_have

#: Addresses of a scratch arena, as a multiple of the machine's memory: of gaps there are few. Where
#: there are not so many, so many bytes serve.
_ADDRESSES, _LEAST_SCRATCH = 4, 1 << 30


class HostDevice(Device):
    """The CPU; the arena is a mapping of host memory."""

    name = "cpu"
    tensors = torch.device("cpu")
    alignment = 64
    keeps_in_place = True

    def open(self, budget: int, lanes: int) -> tuple[Any, Any]:
        """See `Device`."""
        try:
            return _C.Arena.host(budget, lanes), _C.LaneDevice()
        except (RuntimeError, ValueError) as error:
            raise cannot_have(budget, error) from error

    @property
    def memory_limit(self) -> MemoryLimit | None:
        """See `Device`. A mapping may be larger than what there is; using it may not."""
        return memory_limit()

    def scratch(self) -> tuple[Any, Any]:
        """See `Device`. A mapping whose pages cost nothing until they are used; but jobs by the
        hundred may have one each, and a process has no more than 128 TiB of addresses."""
        size = max(_LEAST_SCRATCH, _ADDRESSES * machine_memory())
        while True:
            try:
                return _C.Arena.host(size, 1), _C.LaneDevice()
            except RuntimeError:
                if size <= _LEAST_SCRATCH:
                    raise
                size //= 2
