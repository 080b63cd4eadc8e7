"""What a step asks of its batch (``if mask.all()``, ``lengths.max().item()``): a capture serves the
batches that answer as its own did.

A trace knows no values. Where one that the code asks for follows from the batch alone, by operators
on whole numbers (which have one result on every thread and in every order), it is worked out with
the batch's real tensors, the trace goes on with it, and each later batch is asked first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from waterflow.partitioner.graph.effects import seeded, storage_ids, written_storages
from waterflow.partitioner.graph.step_graph import tensors_of

_NAMESPACES = frozenset({"aten", "prim", "prims"})
_HOST = torch.device("cpu")
_ERROR = "error"
#: Whose results are whatever was in memory.
_UNMADE = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"})
#: Operators on whole numbers of which a device and the host have the same results, whatever the
#: order in which they go: of equal values, a sort or a largest one may tell another place.
_SAME_EVERYWHERE = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "equal", "_local_scalar_dense", "item"),
        *("logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
        *("add", "sub", "rsub", "mul", "neg", "abs", "sign", "minimum", "maximum", "where"),
        *("clamp", "clamp_min", "clamp_max", "remainder", "floor_divide"),
        *("sum", "all", "any", "amax", "amin", "prod", "count_nonzero", "cumsum", "cumprod"),
        *("view", "_unsafe_view", "reshape", "slice", "select", "unsqueeze", "squeeze", "expand"),
        *("permute", "transpose", "t", "alias", "detach", "unbind", "split", "split_with_sizes"),
        *("arange", "full", "ones", "zeros", "full_like", "ones_like", "zeros_like", "new_full"),
        *("new_ones", "new_zeros", "clone", "_to_copy", "cat", "stack", "flip", "roll", "repeat"),
        *("diff", "tril", "triu", "index", "index_select", "gather", "constant_pad_nd"),
    }
)


@dataclass(frozen=True)
class _Place:
    """Which of the batch's tensors, or of the values that were worked out before."""

    kind: str
    number: int


class _Call(NamedTuple):
    """One operator, with places for the tensors among its arguments."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Question:
    """A value that follows from a batch's tensors; equal for equal questions."""

    text: str
    calls: tuple[_Call, ...] = field(compare=False)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[str, Hashable]:
        """The answer of a batch with these tensors, and of what type it is; or the error that there
        is for these values, which the step may come to in its own time."""
        try:
            found = self._answer(tensors)
        except Exception as error:
            return _ERROR, type(error).__name__
        return type(found).__name__, found

    def _answer(self, tensors: Sequence[Tensor]) -> Any:
        found: Any = None
        values: dict[_Place, Any] = {}

        def value_of(argument: Any) -> Any:
            if isinstance(argument, torch.device):  # the job's; a batch comes from the host
                return _HOST
            if not isinstance(argument, _Place):
                return argument
            return tensors[argument.number] if argument.kind == "batch" else values[argument]

        with (
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
        ):
            for number, call in enumerate(self.calls):
                args, kwargs = map_aggregate((call.args, call.kwargs), value_of)
                found = call.target(*args, **kwargs)
                values[_Place("value", number)] = found
        return found


class Asked:
    """The questions that a trace has met, with the answers of the batch that it was made on.

    Attributes:
        answers: those, each with its answer.
    """

    def __init__(self, placeholders: Sequence[fx.Node], tensors: Sequence[Tensor]) -> None:
        """Args beyond the obvious.

        placeholders: the nodes of a graph that stand for the batch's tensors.
        tensors: these.
        """
        self._places = dict(zip(placeholders, range(len(tensors)), strict=True))
        self._tensors = tensors
        self.answers: dict[Question, Hashable] = {}

    def answer(
        self, target: OpOverload, args: Any, kwargs: Any, graph: fx.Graph
    ) -> bool | int | None:
        """What a call returns that asks for a value; its tensors are nodes of the graph. None where
        that does not follow from the batch alone, or nobody can tell."""
        needed: dict[fx.Node, None] = {}
        fx.map_arg((args, kwargs), lambda node: needed.setdefault(node))
        closure = _closure(needed)
        found = [node for node in graph.nodes if node in closure]
        if not (all(map(self._may_be_asked, found)) and _are_as_made(found, graph)):
            return None
        places: dict[fx.Node, _Place] = {}
        calls: list[_Call] = []

        def place_of(node: fx.Node) -> Any:
            return places[node]

        for node in found:
            if node in self._places:
                places[node] = _Place("batch", self._places[node])
                continue
            places[node] = _Place("value", len(calls))
            assert callable(node.target)
            given = fx.map_arg((node.args, node.kwargs), place_of)
            calls.append(_Call(node.target, *given))
        calls.append(_Call(target, *fx.map_arg((args, kwargs), place_of)))
        text = repr([(str(call.target), call.args, call.kwargs) for call in calls])
        question = Question(text, tuple(calls))
        kind, value = question(self._tensors)
        if not isinstance(value, (bool, int)):
            return None
        self.answers[question] = kind, value
        return value

    def _may_be_asked(self, node: fx.Node) -> bool:
        if not all(_is_whole(tensor) for tensor in tensors_of(node)):
            return False
        if node in self._places:
            tensor = self._tensors[self._places[node]]
            return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
        if node.op != "call_function" or seeded(node):
            return False
        if not isinstance(node.target, OpOverload):
            return node.target is operator.getitem
        name = str(node.target._schema.name).partition("::")[2]
        is_known = node.target.namespace in _NAMESPACES and name not in _UNMADE
        on_host = all(tensor.device.type == "cpu" for tensor in tensors_of(node))
        return is_known and (on_host or name in _SAME_EVERYWHERE or _is_largest(node.target))


def _closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These and all that they are made of."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _is_largest(target: OpOverload) -> bool:
    """Whether it tells the largest or smallest of all, and not where that is."""
    return target in (torch.ops.aten.max.default, torch.ops.aten.min.default)


def _is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers, or truths."""
    is_number = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return is_number and not tensor.is_quantized


def _are_as_made(nodes: Iterable[fx.Node], graph: fx.Graph) -> bool:
    """Whether nobody has written to these values since they were made."""
    written = written_storages(graph.nodes)
    return all(written.isdisjoint(storage_ids(node)) for node in nodes)
