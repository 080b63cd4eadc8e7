"""What the nodes of a step graph compute and move, from shapes alone: for estimates of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from waterflow.partitioner.graph.effects import writes
from waterflow.partitioner.graph.step_graph import tensors_of

_aten = torch.ops.aten

#: Operators whose arithmetic is more than an operation an element, and how much it is.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}

#: They read as many elements of their first argument as they return, wherever those lie.
_GATHERS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}

#: They write to their first argument without reading it.
_OVERWRITES = {
    "aten::zero_",
    "aten::fill_",
    "aten::copy_",
    "aten::normal_",
    "aten::uniform_",
    "aten::bernoulli_",
    "aten::exponential_",
}

#: They look at the shape of their first argument only.
_SHAPE_ONLY = {
    f"aten::{name}"
    for kind in ("empty", "zeros", "ones", "full", "rand", "randn")
    for name in (f"{kind}_like", f"new_{kind}")
}

#: They do not read their first argument as a whole.
_PARTLY_READ = _GATHERS | _OVERWRITES | _SHAPE_ONLY

#: They fill nothing in.
_UNFILLED = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


def flops(node: fx.Node) -> int:
    """Arithmetic operations of a node.

    Of one without a formula as many as it reads elements, or else writes: rough, but sizes that
    grow linearly make a number that does.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view:
        return 0
    formula = _FORMULAS.get(target.overloadpacket)
    if formula is not None:
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            return int(formula(*args, **kwargs, out_val=node.meta["val"]))
        except Exception:  # a formula for other arguments than these: an estimate goes on
            pass
    read = sum(tensor.numel() for tensor in _read(node))
    return read or sum(tensor.numel() for tensor in tensors_of(node))


def moved_bytes(node: fx.Node) -> int:
    """Bytes that a node reads and writes; 0 for views, which only change how memory is seen."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view:
        return 0
    name = target._schema.name
    made = _new_results(node, target) if name not in _UNFILLED else 0
    changed = sum(_bytes(tensor) for written in writes(node) for tensor in tensors_of(written))
    return made + changed + sum(map(_bytes, _read(node))) + _gathered(node, name)


def _read(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that an operator reads as a whole, each once."""
    name = node.target._schema.name  # type: ignore[union-attr]
    sources = node.all_input_nodes
    if name in _PARTLY_READ:
        later = tree_leaves((node.args[1:], node.kwargs))
        sources = [leaf for leaf in later if isinstance(leaf, fx.Node)]
    for source in sources:
        yield from tensors_of(source)


def _gathered(node: fx.Node, name: str) -> int:
    return sum(map(_bytes, tensors_of(node))) if name in _GATHERS else 0


def _new_results(node: fx.Node, target: torch._ops.OpOverload) -> int:
    """Bytes of the results that are not the arguments themselves."""
    returns = target._schema.returns
    values = [node.meta.get("val")] if len(returns) == 1 else list(node.meta.get("val") or ())
    return sum(
        _bytes(leaf)
        for value, described in zip(values, returns, strict=False)
        if described.alias_info is None
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; an expanded one has fewer than its shape says."""
    size: int = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())
