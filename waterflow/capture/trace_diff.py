"""Compares two traces of one optimizer step, made with other odd values: what differs is live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from waterflow.capture.traced_floats import Expression, FloatTrace, bits, common_meaning
from waterflow.job.optimizer_state import NotCapturableError, same_value

#: Where a constant stands: (node's name, path in its arguments).
Place = tuple[str, tuple[Any, ...]]

_CHANGING_OPERATIONS = "its operations depend on the values of its hyperparameters"


def live_constants(
    modules: Sequence[fx.GraphModule], floats: Sequence[FloatTrace]
) -> dict[Place, Expression]:
    """The constants that differ between two traces, with the expression that each stands for.

    Raises:
        NotCapturableError: something differs that no expression explains.
    """
    return _Match(modules, floats).run()


class _Match:
    def __init__(self, modules: Sequence[fx.GraphModule], floats: Sequence[FloatTrace]) -> None:
        self.modules = modules
        self.floats = floats
        self.found: dict[Place, Expression] = {}

    def run(self) -> dict[Place, Expression]:
        first, second = (list(module.graph.nodes) for module in self.modules)
        if [_shape(node) for node in first] != [_shape(node) for node in second]:
            raise NotCapturableError(_CHANGING_OPERATIONS)
        for one, other in zip(first, second, strict=True):
            self._arguments(one, (one.args, one.kwargs), (other.args, other.kwargs), ())
            if one.op == "get_attr":
                self._tensors(str(one.target), str(other.target))
        return self.found

    def _tensors(self, one: str, other: str) -> None:
        left, right = getattr(self.modules[0], one), getattr(self.modules[1], other)
        if left is not right and not torch.equal(left, right):
            raise NotCapturableError("it makes a tensor of its hyperparameters")

    def _arguments(self, node: fx.Node, left: Any, right: Any, path: tuple[Any, ...]) -> None:
        """Walks two nodes' arguments side by side; a constant that differs must have a meaning."""
        if isinstance(left, (tuple, list)):
            if len(left) != len(right):
                raise NotCapturableError(_CHANGING_OPERATIONS)
            for place, (one, other) in enumerate(zip(left, right, strict=True)):
                self._arguments(node, one, other, (*path, place))
        elif isinstance(left, dict):
            for key in left:
                self._arguments(node, left[key], right[key], (*path, key))
        elif isinstance(left, fx.Node):
            if left.name != right.name:
                raise NotCapturableError(_CHANGING_OPERATIONS)
        elif isinstance(left, float) and isinstance(right, float):
            self._numbers(node, left, right, path)
        elif not same_value(left, right):
            raise NotCapturableError(
                f"an argument of {node.target} changes with its hyperparameters"
            )

    def _numbers(self, node: fx.Node, left: float, right: float, path: tuple[Any, ...]) -> None:
        if bits(left) == bits(right):
            return
        one, other = (
            trace.meanings.get(bits(value), [])
            for trace, value in zip(self.floats, (left, right), strict=True)
        )
        meaning = common_meaning(one, other)
        if meaning is None:
            raise NotCapturableError(f"it computes a number for {node.target} outside arithmetic")
        self.found[node.name, path] = meaning


def _shape(node: fx.Node) -> tuple[Any, ...]:
    target = str(node.target) if node.op != "get_attr" else ""
    return node.op, target, len(node.args), tuple(node.kwargs)
