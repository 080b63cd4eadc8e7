"""Batches on their way from the data loader to the device, ahead of the step that needs them.

The feeder's thread writes a batch into page-locked memory; the engine's thread queues the copy into
the job's device input, a block of the arena, on a stream of its own. The step's first instructions
copy it on within the device, and the input is free for the next batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from waterflow.executor.device.base import Device
from waterflow.executor.device.storages import rounded, span_of
from waterflow.executor.run.residency import Residency


@dataclass(eq=False)
class PinnedBatch:
    """A batch in page-locked memory.

    Attributes:
        tensors: the batch as the data yielded it.
        buffer: its bytes, one tensor after the other.
        size: bytes.
        sent: whether the copy to the device input is queued.
    """

    tensors: Sequence[torch.Tensor]
    buffer: Any
    size: int
    sent: bool = False


class BatchPrefetcher:
    """One job's batches on their way to its device.

    `pack` is the feeder's; all else is called while no other thread has the job. `_lock` guards
    `_idle`, which both use; `size` is written by the feeder and may be behind by a batch elsewhere.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.device_input = device.device_input()
        self.block: torch.Tensor | None = None
        self.size = 0  # of the largest batch so far
        self._sent: PinnedBatch | None = None  # that is in the device input, to be read yet
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def pack(self, tensors: Sequence[torch.Tensor]) -> PinnedBatch:
        """Copies host tensors into page-locked memory. On the feeder's thread: it may wait."""
        size = sum(_room(tensor, self._device.alignment) for tensor in tensors)
        self.size = max(self.size, size)
        buffer = self._take_buffer(size)
        pinned = PinnedBatch(tensors, buffer, size)
        for view, tensor in zip(self._views(buffer.tensor(), tensors), tensors, strict=True):
            view.copy_(span_of(tensor))
        return pinned

    def _take_buffer(self, size: int) -> Any:
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None or buffer.tensor().numel() < size:
            return self._device.pinned(max(size, self.size, 1))
        buffer.wait()
        return buffer

    def open(
        self, job: int, scope: Callable[[int], AbstractContextManager[Any]], residency: Residency
    ) -> None:
        """Takes the device input's memory in the arena, or more of it. Only between steps.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        if self.block is not None:
            if self.block.numel() >= self.size:
                return
            self.close(residency)
        with scope(job):
            self.block = torch.empty(self.size, dtype=torch.uint8, device=self._device.tensors)
        residency.move_in(job, [self.block])

    def close(self, residency: Residency) -> None:
        """Gives the device input's memory back."""
        if self.block is not None:
            residency.drop(self.block)
            self.block = None
        if self._sent is not None:  # what was sent ahead is gone with it
            self._sent.sent, self._sent = False, None

    def fits(self, pinned: PinnedBatch) -> bool:
        """Whether the device input is large enough as it is."""
        return self.block is not None and pinned.size <= self.block.numel()

    def send(self, pinned: PinnedBatch) -> None:
        """Queues the copy, behind the step that reads the former batch; the host goes on."""
        if pinned.sent or pinned.size == 0:
            return
        self.device_input.send(pinned.buffer, self.block, pinned.size)
        pinned.sent, self._sent = True, pinned

    def receive(self, pinned: PinnedBatch) -> list[torch.Tensor]:
        """The batch as tensors in the device input, of the layout that the data gave them."""
        assert self.block is not None, "the device input is opened when the job enters the arena"
        self._sent = None
        with self._lock:
            self._idle.append(pinned.buffer)  # to be had again when its copy is done
        views = self._views(self.block, pinned.tensors)
        return [
            view.as_strided(tensor.shape, tensor.stride())
            for view, tensor in zip(views, pinned.tensors, strict=True)
        ]

    def _views(self, block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        start = 0
        for tensor in tensors:
            size = span_of(tensor).numel() * tensor.element_size()
            views.append(block[start : start + size].view(tensor.dtype))
            start += _room(tensor, self._device.alignment)
        return views


def _room(tensor: torch.Tensor, alignment: int) -> int:
    return rounded(span_of(tensor).numel() * tensor.element_size(), alignment)
