"""A GPU that is not there: jobs train on host tensors, but memory, streams, events and copies are
those of the fake driver, which executes them late and out of step.

Each node group is queued as one host function on its lane's stream. So a missing wait between
streams, a batch overwritten too early or a block handed out too soon changes the numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import case_fakecuda
import torch

from waterflow.executor.device import CudaDevice


class FakeCudaDevice(CudaDevice):
    """The CUDA device without the parts that need torch's own CUDA library."""

    host_functions = True
    identity = "fake"

    def __init__(self, index: int | None = None) -> None:
        self.library = str(case_fakecuda.library())
        super().__init__(index)

    def _check_torch(self) -> None:
        pass

    def _current_index(self) -> int:
        return 0

    def _tensor_device(self) -> torch.device:
        return torch.device("cpu")

    def _enter_torch(self) -> None:
        pass

    def release_unused(self) -> None:
        pass

    def _take_workspaces(self, thread: str) -> None:
        self._workspaces[thread] = 0

    def generator(self, seed: int) -> torch.Generator | None:
        return None


@contextlib.contextmanager
def nothing_left(driver: case_fakecuda.FakeDriver) -> Iterator[None]:
    """Whatever is taken from the driver inside is given back."""
    before = driver.live_objects()
    yield
    after = driver.live_objects()
    assert after == before
