"""A GPU as a device: device memory, a stream a lane."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.common.errors import JobError
from waterflow.common.units import format_bytes
from waterflow.executor.device.base import Device, Result, cannot_have

#: What a scratch arena on a device grows by at least; less would mean many calls of the driver.
_GROWTH = 256 << 20


class CudaDevice(Device):
    """One GPU; the arena is device memory, a lane is a stream and the thread that feeds it."""

    alignment = 512
    queues = True
    tier_rates = (12e9, 12e9)  # PCI Express 3 with 16 lanes; a faster link only hides more
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
            lasting = not self.host_functions  # PyTorch gets to know them
            streams = _C.LaneStreams(self._device, lanes, lasting)
            arena = _C.Arena.cuda(streams, budget, host_tensors=self.tensors.type == "cpu")
            self._copies = _C.CudaStream(self._device)
            self._scratch_streams = _C.LaneStreams(self._device, 1, lasting)
            self._has_priorities = streams.has_priorities
            self._lane_device = _C.LaneDevice.cuda(streams, self.host_functions)
            # On the host's own thread also where the lanes queue host functions: one at a time.
            self._scratch_device = _C.LaneDevice.cuda(self._scratch_streams, self.host_functions)
        except RuntimeError as error:
            raise cannot_have(budget, error) from error
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
        if self._has_priorities:  # its other stream has a workspace, too
            self._lane_device.set_first(lane, True)
            self._take_workspaces(f"lane {lane}, first")
            self._lane_device.set_first(lane, False)

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

    def device_input(self) -> Any:
        """See `Device`."""
        return _C.DeviceInput(self._copies, self._device)

    def pinned(self, size: int) -> Any:
        """See `Device`."""
        return _C.PinnedBuffer(self._device, size)

    def tier(self, size: int) -> Any:
        """See `Device`. Page-locked, with streams of its own."""
        return _C.DeviceTier(self._device, size, self.host_functions)

    @property
    def pinned_bytes(self) -> int:
        """See `Device`."""
        return int(self._device.most_pinned)

    def failure(self) -> str:
        """See `Device`."""
        return str(self._device.failure())

    @property
    def workspace_bytes(self) -> int:
        """See `Device`."""
        return sum(self._workspaces.values())
