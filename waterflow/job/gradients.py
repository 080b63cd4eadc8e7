"""Gradients between two steps: letting go of those that another thread may look at, and whose they
are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import torch

from waterflow.allocator_ext import _C


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


def is_private(parameter: torch.Tensor, aliases: int = 0) -> bool:
    """Whether nobody but the parameter has its gradient, or another tensor of its memory.

    Args:
        parameter: whose gradient.
        aliases: tensors of that memory that do not count.
    """
    references, uses, uses_of_memory = _uses(parameter)
    return (references, uses, uses_of_memory - aliases) == _PRIVATE


def _uses(parameter: torch.Tensor) -> tuple[int, int, int]:
    """By how many Python objects and by how much of C++ (DLPack, say) the gradient is held, and
    its storage."""
    gradient = parameter.grad
    assert gradient is not None
    gradient.untyped_storage()  # whose Python object counts, once there is one
    return sys.getrefcount(gradient), *_C.uses_of(gradient)


def _private() -> tuple[int, int, int]:
    """What is counted of a gradient that nobody else has: releases of torch differ."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    return _uses(parameter)


_PRIVATE = _private()
