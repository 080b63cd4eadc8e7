"""Intra-op threads of one thread, without changing what other threads get."""

from __future__ import annotations

import threading

import torch

_default_lock = threading.Lock()


def set_threads_here(count: int, default: int) -> None:
    """Gives the calling thread `count` intra-op threads.

    torch remembers the count set last as the one that threads started later begin with, so the
    default is set once more, from a thread that ends at once.
    """
    with _default_lock:
        torch.set_num_threads(count)
        torch.get_num_threads()  # a thread takes the default over at its first look, not before
        restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
        restorer.start()
        restorer.join()
