"""Layouts of the commonest operators' results, where all that they take is contiguous.

torch describes most operators in Python, which takes 0.1 to 0.5 ms each time. Where operands are
contiguous and of one type, results are too, and a few comparisons tell so. The tests compare each
rule with the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
#: Shape and type of a result that is contiguous.
Contiguous = tuple[tuple[int, ...], torch.dtype]
_FORMATS = (torch.preserve_format, torch.contiguous_format)


def rule_of(func: Any) -> Rule | None:
    """The rule for an operator; None where there is none."""
    return _RULES.get(func)


def _like(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    """Elementwise: as the operands are, which are all alike."""
    first = args[0]
    dtype = first.dtype
    if not (dtype.is_floating_point and is_canonical(first)):
        return None
    shape = first.shape
    for value in (*args[1:], *kwargs.values()):
        kind = type(value)
        if kind in _NUMBERS:
            continue
        if kind is torch.dtype:
            if value != dtype:
                return None
        elif kind is torch.memory_format:
            if value not in _FORMATS:
                return None
        elif not isinstance(value, Tensor) or not (
            value.dtype == dtype and value.shape == shape and is_canonical(value)
        ):
            return None
    return shape, dtype


def _softmax(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    return None if args[2] or kwargs else _like(args[:1], kwargs)


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    """``mm``: however the operands lie."""
    left, right = args
    return None if kwargs else _of_matrices(left, right)


def _product_and_sum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    """``addmm`` of a vector or a matrix and a product."""
    added, left, right = args
    found = None if kwargs else _of_matrices(left, right)
    if found is None or added.dtype != found[1]:
        return None
    (rows, columns), _ = found
    return found if tuple(added.shape) in ((columns,), (rows, columns)) else None


def _of_matrices(left: Tensor, right: Tensor) -> Contiguous | None:
    if left.dim() != 2 or right.dim() != 2 or left.dtype != right.dtype:
        return None
    (rows, inner), (others, columns) = left.shape, right.shape
    return ((rows, columns), left.dtype) if inner == others else None


def _sum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    """``sum`` over some dimensions of a contiguous tensor."""
    tensor, dims = args[:2]
    if kwargs or not dims or len(args) > 3 or not tensor.dtype.is_floating_point:
        return None
    if not is_canonical(tensor) or len(set(dims)) < len(dims):
        return None
    rank, keep = tensor.dim(), len(args) == 3 and args[2]
    if not all(0 <= dim < rank for dim in dims):
        return None
    sizes = enumerate(tensor.shape)
    if keep:
        return tuple(1 if place in dims else size for place, size in sizes), tensor.dtype
    return tuple(size for place, size in sizes if place not in dims), tensor.dtype


def _nll_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contiguous | None:
    """The gradient of the negative log likelihood: as the probabilities."""
    gradient, tensor, target, weight = args[:4]
    if kwargs or weight is not None or tensor.dim() != 2 or target.dim() != 1:
        return None
    same = tensor.dtype == gradient.dtype and tensor.dtype.is_floating_point
    return (tensor.shape, tensor.dtype) if same and is_canonical(tensor) else None


Rule = Callable[[Sequence[Any], Mapping[str, Any]], Contiguous | None]


def may_write_in_place(func: Any) -> bool:
    """Whether an operator writes elements into its first argument, and returns that."""
    return func in _IN_PLACE


def writes_in_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether such an operator can have these arguments: all of one shape and type."""
    if not all(type(value) in _NUMBERS for value in kwargs.values()):
        return False
    first = args[0]
    shape, dtype = first.shape, first.dtype
    if not dtype.is_floating_point:
        return False
    for value in args[1:]:
        if type(value) in _NUMBERS:
            continue
        if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != shape:
            return False
    return True


def is_canonical(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, with the strides of a new one in each dimension."""
    return tensor.stride() == strides_of(tensor.shape)


@functools.lru_cache(maxsize=4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


_NUMBERS = frozenset({int, float, bool, type(None)})
_IN_PLACE = frozenset(
    {
        *(_aten.add_.Tensor, _aten.add_.Scalar, _aten.sub_.Tensor, _aten.sub_.Scalar),
        *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar),
        *(_aten.lerp_.Scalar, _aten.addcmul_.default, _aten.addcdiv_.default),
        *(_aten.sqrt_.default, _aten.neg_.default, _aten.copy_.default),
        *(_aten.zero_.default, _aten.fill_.Scalar, _aten.relu_.default),
    }
)
_ELEMENTWISE = (
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
    *(_aten.add.Scalar, _aten.sub.Scalar, _aten.mul.Scalar, _aten.div.Scalar),
    *(_aten.sqrt.default, _aten.rsqrt.default, _aten.neg.default, _aten.abs.default),
    *(_aten.exp.default, _aten.log.default, _aten.tanh.default, _aten.sigmoid.default),
    *(_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.reciprocal.default),
    *(_aten.threshold_backward.default, _aten.tanh_backward.default),
    *(_aten.sigmoid_backward.default, _aten.gelu_backward.default),
    *(_aten.addcmul.default, _aten.addcdiv.default, _aten.lerp.Scalar),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default),
    *(_aten._log_softmax_backward_data.default, _aten._softmax_backward_data.default),
)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _like),
    _aten._log_softmax.default: _softmax,
    _aten._softmax.default: _softmax,
    _aten.mm.default: _product,
    _aten.addmm.default: _product_and_sum,
    _aten.sum.dim_IntList: _sum,
    _aten.nll_loss_backward.default: _nll_backward,
}
