"""Where jobs train: the host, or one CUDA device."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from waterflow.allocator_ext import _C
from waterflow.common.errors import JobError
from waterflow.common.units import format_bytes

Result = TypeVar("Result")

#: What a scratch arena on a device grows by at least; less would mean many calls of the driver.
_GROWTH = 256 << 20


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
        except RuntimeError as error:
            raise _cannot_have(budget, error) from error

    def scratch(self) -> tuple[Any, Any]:
        """See `Device`. A mapping whose pages cost nothing until they are used."""
        size = 1 << 42
        while True:
            try:
                return _C.Arena.host(size, 1), _C.LaneDevice()
            except RuntimeError:
                if size <= 1 << 30:
                    raise
                size //= 2


class CudaDevice(Device):
    """One GPU; the arena is device memory, a lane is a stream and the thread that feeds it."""

    alignment = 512
    queues = True
    library = "libcuda.so.1"
    host_functions = False  # lanes queue operators by calling them

    def __init__(self, index: int | None = None) -> None:
        self._check_torch()
        self.index = self._current_index() if index is None else index
        self.name = f"cuda:{self.index}"
        self.tensors = self._tensor_device()
        try:
            self._device = _C.CudaDevice(self.library, self.index)
        except RuntimeError as error:
            raise JobError(f"device {self.name!r} cannot be used: {error}") from error
        self._workspaces: dict[str, int] = {}

    # What torch's own CUDA library is needed for; the tests' device does without.

    def _check_torch(self) -> None:
        if torch.version.cuda is None:
            raise JobError(
                "device 'cuda' cannot be used: this torch is built without CUDA. Install a CUDA "
                "build of torch and reinstall waterflow, or use device='cpu'"
            )
        if not _C.cuda_built:
            raise JobError(
                "device 'cuda' cannot be used: waterflow's extension was built without CUDA. "
                "Reinstall waterflow beside the present torch, with the CUDA toolkit's headers"
            )

    def _current_index(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def _tensor_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def _enter_torch(self) -> None:
        torch.cuda.init()
        _C.install_cuda_lane_allocator()
        self.release_unused()  # what torch keeps for later is free for the arena

    def release_unused(self) -> None:
        """See `Device`."""
        torch.cuda.empty_cache()

    def _take_workspaces(self, thread: str) -> None:
        """Makes the libraries take their memory for this thread now, beside the arena.

        cuBLAS keeps a workspace for each thread and stream for ever; a step that took it would
        leave a hole in its job's plan.
        """
        before = torch.cuda.memory_allocated(self.index)
        # Flags that the user has set may forbid the products; then his own steps will say so.
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.ones(64, 64, device=self.tensors, dtype=dtype)
                torch.nn.functional.linear(square, square, square[0]).sum()
                torch.mm(square, square)
                del square
        after = torch.cuda.memory_allocated(self.index)
        self._workspaces[thread] = max(0, after - before)

    def _drop_workspaces(self) -> None:
        """Workspaces of streams that are gone would be kept for ever; those in use come back."""
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def wait_for_thread(self) -> None:
        """See `Device`."""
        torch.cuda.current_stream(self.tensors).synchronize()

    def generator(self, seed: int) -> torch.Generator | None:
        """See `Device`."""
        return torch.Generator(device=self.tensors).manual_seed(seed)

    @property
    def identity(self) -> str:
        """See `Device`. Flags choose kernels, and kernels choose workspaces."""
        flags = (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
        )
        return f"{self._device.name}, {torch.version.cuda}, {flags}"

    # The rest speaks to the driver.

    def open(self, budget: int, lanes: int) -> tuple[Any, Any]:
        """See `Device`."""
        self._enter_torch()
        free, total = self._device.memory()
        if budget > free:
            raise JobError(
                f"a budget of {budget} bytes ({format_bytes(budget)}) cannot be had: {self.name} "
                f"({self._device.name}) has {format_bytes(free)} of {format_bytes(total)} free. "
                "Choose a smaller budget, or free memory on the device"
            )
        try:
            streams = _C.LaneStreams(self._device, lanes)
            arena = _C.Arena.cuda(streams, budget, host_tensors=self.tensors.type == "cpu")
            self._copies = _C.CudaStream(self._device)
            self._scratch_streams = _C.LaneStreams(self._device, 1)
            self._lane_device = _C.LaneDevice.cuda(streams, self.host_functions)
            # On the host's own thread also where the lanes queue host functions: one at a time.
            self._scratch_device = _C.LaneDevice.cuda(self._scratch_streams, self.host_functions)
        except RuntimeError as error:
            raise _cannot_have(budget, error) from error
        self._profiler = ThreadPoolExecutor(1, "waterflow-profile", self._adopt_profiler)
        return arena, self._lane_device

    def close(self) -> None:
        """See `Device`."""
        self._profiler.shutdown()
        self._drop_workspaces()

    def adopt_lane(self, lane: int) -> None:
        """See `Device`."""
        self._lane_device.bind(lane)
        self._take_workspaces(f"lane {lane}")

    def _adopt_profiler(self) -> None:
        self._scratch_device.bind(0)
        self._take_workspaces("profile")

    def commit(self, arena: Any) -> None:
        """See `Device`."""
        try:
            arena.commit()
        except RuntimeError as error:
            raise JobError(f"the budget cannot be had any more: {error}") from error

    def scratch(self) -> tuple[Any, Any]:
        """See `Device`. It takes what it needs, step by step, from the device's free memory."""
        host_tensors = self.tensors.type == "cpu"
        arena = _C.Arena.cuda(self._scratch_streams, self.alignment, host_tensors=host_tensors)
        arena.commit()
        arena.set_growth(_GROWTH)
        return arena, self._scratch_device

    def profile(self, function: Callable[[], Result]) -> Result:
        """See `Device`. One thread profiles for all jobs: libraries keep memory for each thread."""
        return self._profiler.submit(function).result()

    def inbox(self) -> Any:
        """See `Device`."""
        return _C.Inbox(self._copies, self._device)

    def pinned(self, size: int) -> Any:
        """See `Device`."""
        return _C.PinnedBuffer(self._device, size)

    def failure(self) -> str:
        """See `Device`."""
        return str(self._device.failure())

    @property
    def workspace_bytes(self) -> int:
        """See `Device`."""
        return sum(self._workspaces.values())


def get_device(device: str | Device) -> Device:
    """The device of a name: "cpu", "cuda" (torch's current one) or "cuda:1".

    Raises:
        JobError: no such device, or it cannot be used here; says why.
    """
    if isinstance(device, Device):
        return device
    if device == "cpu":
        return HostDevice()
    found = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if found is None:
        raise JobError(
            f"device {device!r} is unknown: use 'cpu', 'cuda' or 'cuda:0'; `waterflow doctor` "
            "tells what works here"
        )
    return CudaDevice(None if found[1] is None else int(found[1]))


def _cannot_have(budget: int, error: Exception) -> JobError:
    return JobError(f"a budget of {format_bytes(budget)} cannot be had: {error}")
