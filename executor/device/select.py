"""The device that a user names."""

from __future__ import annotations

import re

from waterflow.common.errors import JobError
from waterflow.executor.device.base import Device
from waterflow.executor.device.cuda import CudaDevice
from waterflow.executor.device.host import HostDevice


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
