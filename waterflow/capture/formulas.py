"""Where torch's C++ computes otherwise while it is traced: such a step is not captured.

Some of its functions ask whether a tensor is "like a subclass", which every tensor is under a
trace, and go by a formula then that looks at no values (`isTensorSubclassLike` and its kin, in
`FunctionsManual.cpp` and under `ATen/native`). Those that differ in more than which tensor is
written to are all here. The bits are others for some values only, or by rounding, so a comparison
of numbers is not sure to find it.

Nor would it find an error that is raised for some values, where what raises it is left out of the
trace: `torch.linalg.inv` and its kin ask whether they have succeeded by an operator that returns
nothing, and so does ``torch._assert_async``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_aten = torch.ops.aten

_DETERMINANT = _aten._linalg_det.default
#: Where a backward pass begins; torch makes the first gradient of each loss by the last one.
_BACKWARD = frozenset(
    {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad, torch.ones_like}
)
#: Its nodes.
_GRADIENTS = re.compile(r"(Prod|Cumprod|Median|Nanmedian)Backward\d+|(MaskedFill|Max|Min)Backward1")
#: Without a gradient, values come from an operator that makes no vectors, but under a trace.
#: Whoever calls one of these functions wants both.
_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _aten._linalg_svd.default: torch.linalg.svd,
    _aten._linalg_eigh.default: torch.linalg.eigh,
    _aten.linalg_eig.default: torch.linalg.eig,
}
_PRODUCTS = frozenset(
    {torch.matmul, torch.linalg.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
)


#: Operators without results that only look at what a graph knows anyway.
_LAYOUT_CHECKS = frozenset({"aten::_assert_tensor_metadata"})


class OtherFormulaError(RuntimeError):
    """What runs is not what it would be traced to."""

    def __init__(self, what: str) -> None:
        super().__init__(f"torch traces {what} by another formula than it runs")


class LostCheckError(RuntimeError):
    """What runs may raise for some values, and what it would be traced to may not."""

    def __init__(self, operator: Any) -> None:
        super().__init__(
            f"{operator} looks at values and may raise, which a captured step would not"
        )


def as_it_runs(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function of torch's, or one that calls the operators which torch runs for real tensors.

    Args:
        function: the function.
        args: its arguments.
        named: those that have a name.
    """
    if function is F.one_hot:
        return _one_hot
    return function


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As it is for real tensors, of which `scatter_` refuses those that have no such class; a trace
    would compare them with all classes, and find that none is theirs."""
    tensor = input
    if tensor.dtype != torch.int64 or tensor.numel() == 0 or num_classes <= 0:
        return F.one_hot(tensor, num_classes)
    made = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


def check_function(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Before traced code calls a function of torch's.

    Args:
        function: the function.
        args: its arguments.
        named: those that have a name.

    Raises:
        OtherFormulaError: eager mode would compute something else.
    """
    if function in _BACKWARD:
        _check_gradients(args[0] if args else _first_of(named, "outputs", "tensors", "input"))
    elif function is F.cross_entropy and _smooths_by_weight(named):
        raise OtherFormulaError("a weighted cross entropy with label smoothing")
    elif function in _PRODUCTS and _is_by_one(
        args[0] if args else named.get("input"), args[1] if len(args) > 1 else named.get("other")
    ):
        raise OtherFormulaError("a product of many matrices with a batch of one")


def _check_gradients(outputs: Any) -> None:
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    waiting = [getattr(output, "grad_fn", None) for output in several]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _GRADIENTS.fullmatch(node.name()):
            raise OtherFormulaError(node.name())
        waiting += [following for following, _ in node.next_functions]


def check_operator(operator: Any, args: Sequence[Any], function: Callable[..., Any] | None) -> None:
    """The same for an operator below autograd, where the function behind it does not tell.

    Args:
        operator: the operator.
        args: those that have no name.
        function: of torch's, that the traced code has called last.

    Raises:
        OtherFormulaError: eager mode would compute something else.
        LostCheckError: eager mode might raise.
    """
    if _only_checks(operator):
        raise LostCheckError(operator)
    if operator is _DETERMINANT and _needs_gradient(args[0]):
        raise OtherFormulaError("a gradient of a determinant")  # whose own goes by how small it is
    asks_for_both = function is _DECOMPOSITIONS.get(operator, function)
    if not (asks_for_both or _needs_gradient(args[0])):
        raise OtherFormulaError(f"{operator} without a gradient")


@functools.cache
def _only_checks(operator: Any) -> bool:
    """Whether an operator returns nothing and writes nothing: a graph, in which nobody reads it,
    would be without it."""
    schema = operator._schema
    return not schema.returns and not schema.is_mutable and schema.name not in _LAYOUT_CHECKS


def _needs_gradient(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # nothing here is the traced code's
        return torch.is_grad_enabled() and tensor.requires_grad


def _first_of(named: Mapping[str, Any], *names: str) -> Any:
    return next((named[name] for name in names if name in named), None)


def _smooths_by_weight(options: Mapping[str, Any]) -> bool:
    """Whether a cross entropy is averaged with weights and label smoothing."""
    weighted = options.get("weight") is not None and options.get("reduction", "mean") == "mean"
    return weighted and bool(options.get("label_smoothing", 0.0) > 0)


def _is_by_one(left: Any, right: Any) -> bool:
    """Whether a product is of many matrices with a batch of one that needs no gradient: the trace
    takes it for a product with that one matrix."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    with torch._C.DisableTorchFunction():
        if left.dim() != 3 or right.dim() != 3 or left.shape[0] == 1:
            return False
        return right.shape[0] == 1 and not right.requires_grad
