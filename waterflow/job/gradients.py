"""Letting go of gradients that another thread may look at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def held_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, ``p.grad = None`` and ``zero_grad`` may run beside threads that read ``p.grad``, as
    captures do.

    Of a gradient that nobody else holds torch (2.13) frees the tensor first, gives up the
    interpreter's lock in the middle of that, and only then forgets it. Whoever reads ``p.grad``
    meanwhile gets a tensor that is gone, and the process dies. Here gradients are freed at the end,
    when no parameter has them any more.

    Args:
        parameters: whose gradients are let go of.
    """
    held = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        held.clear()
