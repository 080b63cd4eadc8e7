"""Questions to the arenas of this process."""

from __future__ import annotations

import torch

from waterflow.allocator_ext import _C


def is_inside(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage lies in an arena."""
    return _C.is_in_arena(tensor.untyped_storage().data_ptr())
