"""What kernels on the host are known to take besides their results, in which order.

A number beside a tensor becomes a tensor of its own and is cast to the type of the computation;
operands of another type are cast whole; a few kernels keep intermediate results. All of it is given
back before the kernel returns. Seen on torch 2.13 by measuring, and compared with it by the tests.
Kernels that are not here are taken to need their results alone; convolutions and recurrent layers
through oneDNN need more, by rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from waterflow.executor.run.instructions import has_single

#: ("take", bytes), ("give", which take, from 0) and ("result", which new result, from 0), in order.
Item = tuple[str, int]
Script = list[Item]

_ARITHMETIC = {"add", "sub", "mul", "div", "rsub"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}

#: Bytes of the tensor that a number becomes: it is a double, an int64 or a bool.
_NUMBER_BYTES = 8


def host_script(node: fx.Node, results: int, threads: int) -> Script:
    """What a node's kernel takes and gives back around its new results.

    Args:
        node: a node of a step on the host.
        results: how many blocks its results need.
        threads: intra-op threads; kernels with partial sums have a row for each.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name, overload = target._schema.name.removeprefix("aten::"), target._schema.overload_name
    rule = _KERNELS.get(name)
    if rule is not None:
        return rule(node, results, threads)
    if name.startswith("_foreach_"):
        if name.removeprefix("_foreach_").removesuffix("_") in _ARITHMETIC:
            return _list_with_numbers(node, results, overload)
    elif name.removesuffix("_") in _ARITHMETIC | _COMPARISONS:
        return _elementwise(node, results, name, overload)
    return _all(results)


def _all(results: int) -> Script:
    return [("result", place) for place in range(results)]


# Elementwise operators


def _elementwise(node: fx.Node, results: int, name: str, overload: str) -> Script:
    if len(node.args) < 2:
        return _all(results)
    left, right = (_operand(value) for value in node.args[:2])
    if has_single(node):
        return _all(results)
    if overload.startswith("Scalar"):
        takes = [("take", size) for size in _number(left, right)]
        order = range(len(takes)) if name in _COMPARISONS else reversed(range(len(takes)))
    else:
        takes = [("take", size) for size in _casts(left, right)]
        order = range(len(takes))
    return [*takes, *_all(results), *(("give", place) for place in order)]


def _list_with_numbers(node: fx.Node, results: int, overload: str) -> Script:
    """Lists are worked off one tensor at a time on the host."""
    if not overload.startswith("Scalar"):
        return _all(results)
    tensors, numbers = node.args[:2]
    assert isinstance(tensors, (list, tuple))
    several = isinstance(numbers, (list, tuple))
    script: Script = []
    count = 0
    for place, tensor in enumerate(tensors):
        number = numbers[place] if several else numbers  # type: ignore[index]
        sizes = _number(_operand(tensor), _operand(number))
        script += [("take", size) for size in sizes]
        script += [("result", place)] if results else []
        script += [("give", count + k) for k in reversed(range(len(sizes)))]
        count += len(sizes)
    return script


def _operand(value: Any) -> Any:
    """A tensor, or a number; those that the step computes are floats."""
    if isinstance(value, fx.Node):
        found = value.meta.get("val")
        return found if isinstance(found, torch.Tensor) else 1.0
    return value


def _common_type(left: Any, right: Any) -> torch.dtype:
    return torch.result_type(left, right)


def _casts(left: Any, right: Any) -> Iterator[int]:
    """Bytes of each operand that is not of the computation's type."""
    common = _common_type(left, right)
    for operand in (left, right):
        if isinstance(operand, torch.Tensor):
            if operand.dtype != common:
                yield operand.numel() * common.itemsize
        elif _type_of(operand) != common:
            yield common.itemsize


def _number(left: Any, right: Any) -> list[int]:
    """Bytes of the tensor that is made of the number, and of its cast."""
    number = right if isinstance(left, torch.Tensor) else left
    cast = _type_of(number) != _common_type(left, right)
    return [_NUMBER_BYTES, *([_common_type(left, right).itemsize] if cast else [])]


def _type_of(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.float64


# Kernels with rules of their own


def _mean(node: fx.Node, results: int, threads: int) -> Script:
    """A sum, divided in place by a whole number."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype == torch.float64:
        return _all(results)
    takes = [("take", _NUMBER_BYTES), ("take", value.element_size())]
    return [*_all(results), *takes, ("give", 1), ("give", 0)]


def _safe_softmax(node: fx.Node, results: int, threads: int) -> Script:
    """A softmax; then the rows of nothing but minus infinity are found, and filled."""
    value = node.meta["val"]
    rows = value.numel() // max(value.shape[node.args[1]], 1)  # type: ignore[index]
    takes = [("take", value.numel()), ("take", rows), ("take", _NUMBER_BYTES)]
    return [*_all(results), *takes, ("give", 2), ("give", 1), ("give", 0)]


def _layer_norm_backward(node: fx.Node, results: int, threads: int) -> Script:
    """Each thread has its own sums for the gradients of weight and bias."""
    _, *weights = node.meta["val"]
    sums = next((w for w in weights if isinstance(w, torch.Tensor)), None)
    if sums is None:
        return _all(results)
    return [*_all(results), ("take", 2 * threads * _bytes(sums)), ("give", 0)]


def _batch_norm(node: fx.Node, results: int, threads: int) -> Script:
    """Sums for the statistics (a row for each thread, with channels innermost), and a last pair."""
    value, mean, _ = node.meta["val"]
    if mean.numel() == 0:  # in evaluation
        return _all(results)
    row = _bytes(mean)
    rows = [row, row, *([threads * row] if _channels_innermost(value) else [])]
    back = [("give", place) for place in reversed(range(len(rows)))]
    takes = [("take", size) for size in rows]
    last = len(rows)
    again = [("take", row), ("take", row), ("give", last + 1), ("give", last)]
    return [*_all(results), *takes, *back, *again]


def _batch_norm_backward(node: fx.Node, results: int, threads: int) -> Script:
    """The input's gradient is made twice, and the first one given back.

    The fake kernel makes all three gradients; of those that are masked out the real one makes none.
    """
    made = sum(isinstance(value, torch.Tensor) for value in node.meta["val"])
    training, mask = node.args[7], list(node.args[9])  # type: ignore[arg-type]
    if results != made or not training:
        return _all(results)
    value, mean = _operand(node.args[0]), _operand(node.args[5])
    script: Script = [("take", _bytes(value))] if mask[0] else []
    script += [("result", place) for place in range(1, 1 + sum(mask[1:]))]
    script += [("result", 0), ("give", 0)] if mask[0] else []
    if _channels_innermost(value):
        script += [("take", 2 * threads * _bytes(mean)), ("give", 1 if mask[0] else 0)]
    return script


def _bytes(tensor: torch.Tensor) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size


def _channels_innermost(value: torch.Tensor) -> bool:
    return value.dim() == 2 or (value.dim() > 2 and value.stride(1) == 1 and value.shape[1] > 1)


_KERNELS: Mapping[str, Callable[[fx.Node, int, int], Script]] = {
    "mean": _mean,
    "_safe_softmax": _safe_softmax,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
}
