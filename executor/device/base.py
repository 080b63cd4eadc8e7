"""What a device is to an engine: the contract that every device keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from waterflow.common.errors import JobError
from waterflow.common.units import format_bytes

Result = TypeVar("Result")


class Device:
    """A device with the arena, lanes and scratch memory of one engine on it.

    Attributes:
        name: as users write it, with the index.
        tensors: where the tensors of its jobs are.
        alignment: bytes to which the arena rounds.
        queues: whether lanes only queue work, which is done later.
        keeps_in_place: whether tensors stay in the user's memory and the arena only counts them.
    """

    name: str
    tensors: torch.device
    alignment: int
    queues: bool = False
    keeps_in_place: bool = False

    def open(self, budget: int, lanes: int) -> tuple[Any, Any]:
        """The arena for a budget, and what the lanes execute on. Once per object.

        Raises:
            JobError: the device or the budget cannot be had; says why.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what `open` has taken, except what tensors still hold."""

    def adopt_lane(self, lane: int) -> None:
        """Prepares the calling thread, which is `lane` from now on."""

    def commit(self, arena: Any) -> None:
        """Takes the budget's memory, where it has only been reserved so far.

        Raises:
            JobError: it is not there any more.
        """

    def release_unused(self) -> None:
        """Hands memory that torch keeps for later back to the device."""

    def scratch(self) -> tuple[Any, Any]:
        """An arena to profile in and what executes on it: one lane, larger than any step."""
        raise NotImplementedError

    def profile(self, function: Callable[[], Result]) -> Result:
        """Runs a measurement where it is not disturbed; returns or raises what it does."""
        return function()

    def generator(self, seed: int) -> torch.Generator | None:
        """A random stream of the device; None where the host's serves."""
        return None

    def inbox(self) -> Any:
        """A new inbox for a job's batches, None where batches are there already."""
        return None

    def pinned(self, size: int) -> Any:
        """A page-locked buffer to send batches from."""
        raise NotImplementedError(f"{self.name} needs no page-locked memory")

    def wait_for_thread(self) -> None:
        """Returns when all that torch has queued for the calling thread is done."""

    def failure(self) -> str:
        """What has broken the device for good; empty while it works."""
        return ""

    @property
    def identity(self) -> str:
        """What profiles depend on beside the graph."""
        return str(torch.backends.cpu.get_cpu_capability())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the device that libraries hold for the lanes, beside the budget."""
        return 0


def cannot_have(budget: int, error: Exception) -> JobError:
    """What to raise where a budget is refused."""
    return JobError(f"a budget of {format_bytes(budget)} cannot be had: {error}")
