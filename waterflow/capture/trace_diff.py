"""Finds what is live in an optimizer's traces: in one, where that is sure, or by comparing two.

A number in a trace whose digits are those of exactly one remembered expression is that expression:
odd values are random to the last digit. Where each of the others is a plain literal, which nothing
computed with odd values comes to, one trace tells all. Else two are compared that were made with
other odd values: what differs is live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.capture.recording import Recording
from waterflow.capture.traced_floats import Expression, FloatTrace, bits, common_meaning
from waterflow.job.optimizer_state import NotCapturableError, same_value

#: Where a constant stands: (node's name, path in its arguments).
Place = tuple[str, tuple[Any, ...]]

_CHANGING_OPERATIONS = "its operations depend on the values of its hyperparameters"


def live_constants(
    recordings: Sequence[Recording], floats: Sequence[FloatTrace]
) -> dict[Place, Expression]:
    """The constants that differ between two traces, with the expression that each stands for.

    Raises:
        NotCapturableError: something differs that no expression explains.
    """
    return _Match(recordings, floats).run()


def sure_constants(
    recording: Recording,
    floats: FloatTrace,
    fixed: Collection[Any] = (),
    updating: Collection[fx.Node] | None = None,
) -> dict[Place, Expression] | None:
    """The live constants of a trace, with the expression that each stands for.

    Args:
        module: the trace.
        floats: its traced floats.
        fixed: values of hyperparameters that were no traced floats.
        updating: the nodes that an optimizer has made; None: all. The others have no numbers of
            its.

    Returns:
        None where only another trace can tell.
    """
    found: dict[Place, Expression] = {}
    literals = {bits(value) for value in fixed if isinstance(value, float)}
    try:
        for node in recording.graph.nodes:
            if updating is not None and node not in updating:
                numbers = _floats((node.args, node.kwargs), ())
                if any(bits(number) in floats.meanings for _, number in numbers):
                    return None
                continue
            if node.op == "get_attr":
                _check_tensor(recording.constant_of(node), literals)
            for path, number in _floats((node.args, node.kwargs), ()):
                meanings = set(floats.meanings.get(bits(number), ()))
                if len(meanings) + _is_literal(number, literals) != 1:
                    return None
                if meanings:
                    found[node.name, path] = meanings.pop()
    except _UnsureError:
        return None
    return found


class _UnsureError(Exception):
    """Something that may come from hyperparameters. Never a user's."""


def _floats(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
    if isinstance(value, (tuple, list)):
        for place, part in enumerate(value):
            yield from _floats(part, (*path, place))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _floats(part, (*path, key))
    elif isinstance(value, float):
        yield path, value
    elif isinstance(value, complex):
        raise _UnsureError


def _check_tensor(tensor: torch.Tensor, literals: Collection[bytes]) -> None:
    """A tensor of the user's own, or one made of numbers: only the least of them are sure."""
    if isinstance(tensor, FakeTensor) or tensor.numel() != 1:
        raise _UnsureError
    if not _is_literal(float(tensor.item()), literals):
        raise _UnsureError


def _is_literal(number: float, literals: Collection[bytes]) -> bool:
    """Whether a number is one that code has as it stands, and no computation with odd values."""
    return (number.is_integer() and abs(number) <= _MOST_LITERAL) or bits(number) in literals


#: Whole numbers up to this are literals.
_MOST_LITERAL = 64


class _Match:
    def __init__(self, recordings: Sequence[Recording], floats: Sequence[FloatTrace]) -> None:
        self.recordings = recordings
        self.floats = floats
        self.found: dict[Place, Expression] = {}

    def run(self) -> dict[Place, Expression]:
        first, second = (list(recording.graph.nodes) for recording in self.recordings)
        if [_shape(node) for node in first] != [_shape(node) for node in second]:
            raise NotCapturableError(_CHANGING_OPERATIONS)
        for one, other in zip(first, second, strict=True):
            self._arguments(one, (one.args, one.kwargs), (other.args, other.kwargs), ())
            if one.op == "get_attr":
                self._tensors(one, other)
        return self.found

    def _tensors(self, one: fx.Node, other: fx.Node) -> None:
        left, right = self.recordings[0].constant_of(one), self.recordings[1].constant_of(other)
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
