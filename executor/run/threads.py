"""What one thread computes with: its intra-op threads, how it deals with denormals, its cores.

Set for it alone, without changing what other threads get.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import NamedTuple

import torch

from waterflow.allocator_ext import _C

#: Between the two settings that `set_threads_here` makes, no other thread may make its own.
_default_lock = threading.Lock()


def set_threads_here(count: int, default: int) -> None:
    """Gives the calling thread `count` intra-op threads.

    Args:
        count: how many.
        default: what threads begin with that are started later. Where only torch's own call can
            set the count, it sets that, too; so it is set once more, from a thread that ends at
            once.
    """
    if _C.set_intra_op_threads(count):
        return
    with _default_lock:
        torch.set_num_threads(count)
        torch.get_num_threads()  # a thread takes the default over at its first look, not before
        restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
        restorer.start()
        restorer.join()


class ThreadSettings(NamedTuple):
    """What the calling thread computes with, where numbers may depend on it.

    Attributes:
        intra_op: its intra-op threads (`torch.set_num_threads`).
        flushes: whether it takes denormal numbers for zero (`torch.set_flush_denormal`).
        autocasts: how many contexts of autocast it is in. Whoever leaves the last one empties the
            cache of weights that were cast.
    """

    intra_op: int
    flushes: bool
    autocasts: int

    @classmethod
    def here(cls) -> ThreadSettings:
        """Those of the calling thread."""
        return cls(*_C.thread_settings())

    def set_here(self) -> None:
        """Gives them to the calling thread."""
        now = ThreadSettings.here()
        if now.intra_op != self.intra_op:
            set_threads_here(self.intra_op, self.intra_op)
        if now.flushes != self.flushes:
            torch.set_flush_denormal(self.flushes)
        for _ in range(now.autocasts, self.autocasts):
            torch.autocast_increment_nesting()
        for _ in range(self.autocasts, now.autocasts):
            torch.autocast_decrement_nesting()


def available_cpus() -> list[int]:
    """The cores that this process may use, in order; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def split_cpus(cpus: list[int], lanes: int, threads: int) -> list[list[int]] | None:
    """Disjoint cores for each lane, None where there are fewer than the lanes' threads.

    Lanes wake each other at every pair; left alone, the system tends to wake a lane on the core of
    the one that woke it, and then the two take turns there.
    """
    share = len(cpus) // lanes
    if share < threads:
        return None
    return [cpus[lane * share : (lane + 1) * share] for lane in range(lanes)]


def pin_here(cpus: Collection[int]) -> None:
    """Keeps the calling thread, and threads that it starts, on these cores."""
    if cpus:
        os.sched_setaffinity(0, cpus)
