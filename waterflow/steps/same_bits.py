"""Whether two numbers, or two tensors, are the same bit for bit."""

from __future__ import annotations

import torch

#: An integer type for each size of an element.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_number(left: float, right: float) -> bool:
    """Whether two losses are the same number; NaN is NaN."""
    return left == right or (left != left and right != right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, bit for bit; one NaN counts as another."""
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
