"""Devices as a roofline sees them (Williams, Waterman and Patterson, 2009), to estimate times.

An estimate says how long a node takes at least: its arithmetic at the peak rate, or its memory
traffic at the full bandwidth, whichever takes longer, and the launch. Real kernels take longer, by
much the same factor for all, so that shares and orders come out better than times.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from waterflow.common.errors import JobError
from waterflow.partitioner.profile import FloatArray, IntArray

_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device's peak rates, from its data sheet.

    Attributes:
        name: what users write.
        flops: operations per second in single precision.
        bandwidth: bytes per second of its memory.
        alignment: bytes to which an arena on it rounds.
    """

    name: str
    flops: float
    bandwidth: float
    alignment: int = 512

    def seconds(self, flops: IntArray, moved_bytes: IntArray) -> FloatArray:
        """Estimated seconds per node from its operations and the bytes that it moves."""
        busy = np.maximum(flops / self.flops, moved_bytes / self.bandwidth)
        return np.where(moved_bytes + flops > 0, busy + _LAUNCH_SECONDS, 0.0)


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(name="p100", flops=9.3e12, bandwidth=732e9),
        Hardware(name="v100", flops=15.7e12, bandwidth=900e9),
        Hardware(name="a100", flops=19.5e12, bandwidth=2039e9),
        Hardware(name="h100", flops=67e12, bandwidth=3350e9),
        Hardware(name="h200", flops=67e12, bandwidth=4800e9),
        # Two cores with AVX2, about; measured profiles replace the estimate where there are any.
        Hardware(name="cpu", flops=1e11, bandwidth=2e10, alignment=64),
    )
}
"""Devices by the names that users write."""


def get_hardware(name: str | None) -> Hardware:
    """The device of that name, or what this machine has where there is none; JobError with the
    names that there are."""
    if name is None:
        return HARDWARE[_own_name()]
    if name not in HARDWARE:
        near = difflib.get_close_matches(name.lower(), HARDWARE, n=1)
        hint = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise JobError(f"there is no hardware {name!r}; {hint} {', '.join(HARDWARE)}")
    return HARDWARE[name]


def _own_name() -> str:
    """The device that jobs would train on here: the GPU, as the nearest one that there is a data
    sheet of, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    card = torch.cuda.get_device_name().lower()
    return next((name for name in HARDWARE if name in card), "v100")
