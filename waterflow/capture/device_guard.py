"""torch's stand-in for CUDA's guard of devices, where torch is built for CUDA and there is none.

A mode for fake tensors makes it when it is first entered. Up to torch 2.12 it belongs to the thread
that has entered, and is used, by all threads, after that one has ended.
"""

from __future__ import annotations

import functools
import threading

import torch


@functools.cache
def keep_device_guard() -> None:
    """Has the stand-in made on a thread that does not end, unless there is one already, or none is
    needed. Before a mode is entered."""
    if not torch.cuda._is_compiled() or torch.cuda.is_available():
        return
    is_made = threading.Event()

    def make_and_stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_made.set()
        threading.Event().wait()

    threading.Thread(target=make_and_stay, name="waterflow-device-guard", daemon=True).start()
    is_made.wait()
