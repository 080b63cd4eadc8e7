"""What a device is to an engine: the contract that every device keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from waterflow.allocator_ext import _C
from waterflow.common.errors import JobError
from waterflow.common.machine import MemoryLimit
from waterflow.common.units import format_bytes

Result = TypeVar("Result")


class Device:
    """A device with the arena, lanes and scratch memory of one engine on it.

    An engine calls `open` once, `adopt_lane` on the thread of each lane before that lane works,
    `commit` before the first job moves in, and `close` when all lanes have ended. Between them:

    - The arena that `open` returns is empty; it has the lanes and the alignment asked for, counts
      the budget as its capacity, and never gives out more than that. It outlives the device for as
      long as something refers to it. Nothing of the budget need be taken before `commit`.
    - Work of a lane is done in the order in which it was given to the lane; a mark of the lane
      (`LaneDevice.mark`) is reached when all before it is done. Where `queues` is false that is
      so when the call returns.
    - A scratch arena is apart from the budget and from other scratch arenas: a measurement changes
      nothing that a job sees, and its memory is the system's again when the arena is gone.
    - `close` can be called once all tensors of the lanes are idle; what they hold stays valid.

    The conformance suite is `tests/executor/device/test_device.py`; a new device joins its list.

    Attributes:
        name: as users write it, with the index.
        tensors: where the tensors of its jobs are.
        alignment: bytes to which the arena rounds, a power of two.
        queues: whether lanes only queue work, which is done later.
        keeps_in_place: whether tensors stay in the user's memory and the arena only counts them.
        tier_rates: bytes per second to the memory that values are spilled to, and from it, as
            plans take them to be.
    """

    name: str
    tensors: torch.device
    alignment: int
    queues: bool = False
    keeps_in_place: bool = False
    tier_rates: tuple[float, float] = (6e9, 6e9)  # one core's copies

    def open(self, budget: int, lanes: int) -> tuple[Any, Any]:
        """The arena for a budget, and what the lanes execute on. Once per object.

        Args:
            budget: bytes that all jobs together may hold.
            lanes: how many lanes work at once.

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
        """An arena to profile in and what executes on it: one lane, larger than any step.

        It takes memory as it is asked for. After `open` only.
        """
        raise NotImplementedError

    def profile(self, function: Callable[[], Result]) -> Result:
        """Runs a measurement where it is not disturbed; returns or raises what it does.

        Several threads may ask at once: measurements of a device that `queues` run one at a time.
        """
        return function()

    def generator(self, seed: int) -> torch.Generator | None:
        """A random stream of the device; None where the host's serves."""
        return None

    def device_input(self) -> Any:
        """A new device input for a job's batches, None where batches are there already."""
        return None

    def pinned(self, size: int) -> Any:
        """A page-locked buffer of `size` bytes to send batches from.

        Raises:
            NotImplementedError: batches are there already; the device has no device input.
        """
        raise NotImplementedError(f"{self.name} needs no page-locked memory")

    def tier(self, size: int) -> Any:
        """Memory of `size` bytes that values are spilled to, with what copies them.

        Raises:
            RuntimeError: it cannot be had.
        """
        return _C.Tier.memory(size)

    @property
    def pinned_bytes(self) -> int:
        """The most page-locked host memory that was taken so far: for batches, for what is spilled
        and for tensors of jobs that rest."""
        return 0

    def wait_for_thread(self) -> None:
        """Returns when all that torch has queued for the calling thread is done."""

    def failure(self) -> str:
        """What has broken the device for good; empty while it works."""
        return ""

    @property
    def identity(self) -> str:
        """What profiles depend on beside the graph: never empty, equal for equal devices."""
        return str(torch.backends.cpu.get_cpu_capability())

    @property
    def memory_limit(self) -> MemoryLimit | None:
        """What there is of the memory that budgets are of, where `open` does not refuse more."""
        return None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the device that libraries hold for the lanes, beside the budget."""
        return 0


def cannot_have(budget: int, error: Exception) -> JobError:
    """What to raise where a budget is refused."""
    return JobError(
        f"a budget of {format_bytes(budget)} cannot be had: {error}; memory= is what all jobs "
        "together may hold"
    )
