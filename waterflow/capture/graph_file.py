"""A step's traces as plain data: JSON of operators, arguments, layouts and what inputs stand for.

Nothing in it is code: an operator is a name that torch has to know, with the schema that it had,
and a tensor that the trace knows by reference is a number, under which the reading job has its own.
What has no such form (other tensors, operators of extensions, numbers that only exist in one
process) is not written at all. `graph_values` has the tensors that nodes stand for.
"""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.capture.forward import ForwardTrace
from waterflow.capture.graph_values import NotPlainError, ValueReader, ValueWriter
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.recording import Recording, add_call
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.traced_floats import Guard
from waterflow.job.optimizer_state import Layout, StateLayout
from waterflow.partitioner.graph.effects import only_copied
from waterflow.partitioner.graph.step_graph import Input

#: Changes with the form.
_VERSION = 2
_TAKE = "getitem"
#: Literal tensors up to this size are written, by their bytes.
_MOST_LITERAL = 1 << 14

#: All that traces consist of: what is not written here would be lost.
_OF_FORWARD = {
    *("recording", "inputs", "loss", "gradients", "backward_start", "reassigned", "metrics"),
    *("stand_ins", "is_whole", "changes_batch"),
}
_OF_OPTIMIZER = {
    *("recording", "inputs", "outputs", "constants", "state_before", "state_after", "fixed"),
    *("live", "guards", "values"),
}

Number = Callable[[torch.Tensor], int | None]


@dataclass(frozen=True)
class Traces:
    """What a capture is made of.

    Attributes:
        forward: the forward and backward pass.
        first: the optimizer's step that creates its state; None where that is there.
        steady: its later steps.
    """

    forward: ForwardTrace
    first: OptimizerTrace | None
    steady: OptimizerTrace


def written(traces: Traces, number: Number) -> bytes:
    """The traces as JSON.

    Args:
        traces: of a step on the host.
        number: of a tensor that the trace knows by reference; None where it has none.

    Raises:
        NotPlainError: there is something that has no plain form.
    """
    writer = _Writer(number)
    document = {
        "version": _VERSION,
        "forward": writer.forward(traces.forward),
        "first": None if traces.first is None else writer.optimizer(traces.first),
        "steady": writer.optimizer(traces.steady),
        "operators": writer.operators,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def read(content: bytes, tensors: Mapping[int, torch.Tensor]) -> Traces:
    """The traces that were written, for a job that has these tensors by their numbers.

    Raises:
        Exception: whatever is wrong with the content: it is of no use then.
    """
    document = json.loads(content)
    if document["version"] != _VERSION:
        raise ValueError("another version")
    reader = _Reader(document["operators"], tensors)
    first = document["first"]
    return Traces(
        reader.forward(document["forward"]),
        None if first is None else reader.optimizer(first),
        reader.optimizer(document["steady"]),
    )


class _Writer:
    def __init__(self, number: Number) -> None:
        self.operators: list[list[str]] = []
        self._number = number
        self._known: dict[Any, int] = {}

    def forward(self, trace: ForwardTrace) -> dict[str, Any]:
        is_other = trace.stand_ins or trace.is_whole or trace.changes_batch
        if vars(trace).keys() != _OF_FORWARD or is_other:
            raise NotPlainError("a trace of another form")
        nodes = {node: place for place, node in enumerate(trace.recording.graph.nodes)}
        return {
            "nodes": self._nodes(trace.recording, None),
            "inputs": [[meaning.kind, meaning.key] for meaning in trace.inputs],
            "outputs": [nodes[node] for node in trace.recording.outputs],
            "loss": nodes[trace.loss],
            "gradients": [None if node is None else nodes[node] for node in trace.gradients],
            "backward": trace.backward_start,
            "reassigned": trace.reassigned,
            "metrics": list(trace.metrics),
        }

    def optimizer(self, trace: OptimizerTrace) -> dict[str, Any]:
        nodes = {node: place for place, node in enumerate(trace.recording.graph.nodes)}
        if vars(trace).keys() != _OF_OPTIMIZER:
            raise NotPlainError("a trace of another form")
        if any(key[0] == "hyper" for key in trace.inputs):
            raise NotPlainError("a hyperparameter that is a tensor")
        return {
            "nodes": self._nodes(trace.recording, trace),
            "inputs": _plain(trace.inputs),
            "outputs": [[_plain(key), nodes[node]] for key, node in trace.outputs.items()],
            "ends": [nodes[node] for node in trace.recording.outputs],
            "constants": [[_plain(p), _plain(e)] for p, e in trace.constants.items()],
            "before": [_state(entries) for entries in trace.state_before],
            "after": [_state(entries) for entries in trace.state_after],
            "fixed": [[_plain(key), _plain(value)] for key, value in trace.fixed.items()],
            "live": sorted(map(_plain, trace.live), key=repr),
            "guards": [
                [g.comparison, _plain(g.left), _plain(g.right), g.outcome] for g in trace.guards
            ],
        }

    def _nodes(self, recording: Recording, optimizer: OptimizerTrace | None) -> list[Any]:
        values, places = ValueWriter(), dict[fx.Node, int]()
        found: list[Any] = []
        for node in recording.graph.nodes:
            if node.op == "output":
                continue
            value = node.meta.get("val") if optimizer is None else optimizer.value_of(node)
            line: list[Any] = [node.name, values.value(value)]
            if node.op == "get_attr":
                line += ["constant", self._constant(recording.constant_of(node), node)]
            elif node.op == "placeholder":
                line.append("input")
            else:
                args, kwargs = values.argument(node.args, places), {}
                if node.kwargs:
                    kwargs = {k: values.argument(v, places) for k, v in node.kwargs.items()}
                line += [self._operator(node.target), args, *([kwargs] if kwargs else [])]
            places[node] = len(found)
            found.append(line)
        return found

    def _operator(self, target: Any) -> int:
        if target not in self._known:
            if target is operator.getitem:
                self.operators.append([_TAKE, ""])
            elif isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
                self.operators.append([str(target), str(target._schema)])
            else:
                raise NotPlainError(f"the operator {target}")
            self._known[target] = len(self.operators) - 1
        return self._known[target]

    def _constant(self, tensor: torch.Tensor, node: fx.Node) -> Any:
        number = self._number(tensor)
        if number is not None:
            return number
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        if not (plain and only_copied(node) and tensor.nbytes <= _MOST_LITERAL):
            raise NotPlainError("a tensor that the step has by reference")
        if isinstance(tensor, FakeTensor) or not tensor.is_contiguous() or tensor.is_conj():
            raise NotPlainError("a tensor of another kind")
        held = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        name = str(tensor.dtype).removeprefix("torch.")
        return [name, list(tensor.shape), base64.b64encode(held).decode()]


class _Reader:
    def __init__(self, operators: list[list[str]], tensors: Mapping[int, torch.Tensor]) -> None:
        self._operators = [_operator(name, schema) for name, schema in operators]
        self._tensors = tensors

    def forward(self, found: dict[str, Any]) -> ForwardTrace:
        recording, nodes = self._recording(found["nodes"], found["outputs"])
        return ForwardTrace(
            recording,
            [Input(kind, key) for kind, key in found["inputs"]],
            nodes[found["loss"]],
            [None if place is None else nodes[place] for place in found["gradients"]],
            found["backward"],
            found["reassigned"],
            tuple(found["metrics"]),
        )

    def optimizer(self, found: dict[str, Any]) -> OptimizerTrace:
        recording, nodes = self._recording(found["nodes"], found["ends"])
        return OptimizerTrace(
            recording,
            list(_tuples(found["inputs"])),
            {_tuples(key): nodes[place] for key, place in found["outputs"]},
            {_tuples(place): _tuples(expression) for place, expression in found["constants"]},
            _states(found["before"]),
            _states(found["after"]),
            {_tuples(key): _tuples(value) for key, value in found["fixed"]},
            frozenset(map(_tuples, found["live"])),
            [Guard(c, _tuples(left), _tuples(right), o) for c, left, right, o in found["guards"]],
        )

    def _recording(self, lines: list[Any], outputs: list[int]) -> tuple[Recording, list[fx.Node]]:
        recording, nodes = Recording(), list[fx.Node]()
        values = ValueReader(CaptureMode(), nodes)
        for name, value, kind, *rest in lines:
            node = self._node(recording, values, name, kind, rest)
            if node.name != name:
                raise ValueError(f"a node named {name} twice")
            if value is not None:
                node.meta["val"] = values.value(value)
            nodes.append(node)
        recording.outputs = [nodes[place] for place in outputs]
        recording.graph.output(recording.outputs)  # type: ignore[arg-type]
        return recording, nodes

    def _node(
        self, recording: Recording, values: ValueReader, name: str, kind: Any, rest: list[Any]
    ) -> fx.Node:
        graph = recording.graph
        if kind == "input":
            return graph.placeholder(name)
        if kind == "constant":
            recording.constants[name] = self._constant(rest[0])
            return graph.get_attr(name)
        args = tuple(values.argument(part) for part in rest[0])
        kwargs = {k: values.argument(v) for k, v in rest[1].items()} if len(rest) > 1 else None
        return add_call(graph, self._operators[kind], args, kwargs, name)

    def _constant(self, found: Any) -> torch.Tensor:
        if isinstance(found, int):
            return self._tensors[found]
        name, shape, held = found
        raw = torch.frombuffer(bytearray(base64.b64decode(held)), dtype=torch.uint8)
        return raw.view(getattr(torch, name)).reshape(shape).clone()


def _operator(name: str, schema: str) -> Callable[..., Any]:
    """An operator by its name, where it still has its schema."""
    if name == _TAKE:
        return operator.getitem
    namespace, base, overload = name.split(".")
    if namespace != "aten":
        raise ValueError(f"an operator {name}")
    found = getattr(getattr(torch.ops.aten, base), overload)
    if not isinstance(found, torch._ops.OpOverload) or str(found._schema) != schema:
        raise ValueError(f"an operator {name} of another schema")
    return found


def _plain(value: Any) -> Any:
    """Numbers, texts and tuples of them; tuples become lists, as there are no lists among them."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if type(value) is tuple or type(value) is list:
        return [*map(_plain, value)]
    raise NotPlainError(f"a value of {type(value)}")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if type(value) is list else value


def _state(entries: dict[Any, Any]) -> list[Any]:
    found = []
    for key, value in entries.items():
        if isinstance(value, Layout):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.device.type != "cpu":
                raise NotPlainError("a state elsewhere than on the host")
            found.append([_plain(key), [dtype, list(value.shape), list(value.stride)]])
        elif value is None or type(value) in (bool, int, float, str):
            found.append([_plain(key), value])
        else:
            raise NotPlainError(f"a state of {type(value)}")
    return found


def _states(found: list[Any]) -> StateLayout:
    return [{_tuples(key): _layout(value) for key, value in entries} for entries in found]


def _layout(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    dtype, shape, stride = value
    return Layout(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device("cpu"))
