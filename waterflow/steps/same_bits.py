"""Whether two numbers, tensors or batches are the same bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from waterflow.allocator_ext import _C

#: An integer type for each size of an element.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Containers within containers of a batch; what lies deeper is taken to be the same.
_DEEPEST = 16


def same_number(left: float, right: float) -> bool:
    """Whether two losses are the same number; NaN is NaN."""
    return left == right or (left != left and right != right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, bit for bit; one NaN counts as another."""
    if _C.has_same_bits(left, right):
        return True
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout != torch.strided:
        return torch.equal(left.detach().to_dense(), right.detach().to_dense())
    one, other = _plain(left), _plain(right)
    whole = _WHOLE[one.element_size()]
    if torch.equal(one.view(whole), other.view(whole)):
        return True
    if not one.is_floating_point():
        return False
    differ = one.view(whole) != other.view(whole)
    return not bool((differ & ~(one.isnan() & other.isnan())).any())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def same_contents(left: Any, right: Any, depth: int = _DEEPEST) -> bool:
    """Whether two batches hold the same: tensors and arrays by bits, in the same containers."""
    if left is right or not depth:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, (int, float, complex, str, bytes)):
        return repr(left) == repr(right)
    if isinstance(left, Mapping):
        left, right = [*left.items()], [*right.items()]
    elif not isinstance(left, (list, tuple)):
        left, right = _attributes(left), _attributes(right)
    return len(left) == len(right) and all(
        same_contents(one, other, depth - 1) for one, other in zip(left, right, strict=True)
    )


def _attributes(value: object) -> list[tuple[str, Any]]:
    return list(getattr(value, "__dict__", {}).items())
