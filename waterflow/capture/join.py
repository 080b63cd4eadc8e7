"""Joins the traces of a training step into one flat graph: all that a job does per batch.

The forward and backward pass and the optimizer's step are traced apart and joined here, so that an
optimizer which cannot be captured exactly runs eagerly while the rest still flows. The first step,
which creates the optimizer's state, is a graph of its own: exactly what the eager loop does.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.capture.forward import (
    ForwardTrace,
    mutated_by,
    named_tensors,
)
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.recording import Recording, add_call
from waterflow.capture.traced_floats import ARITHMETIC, Expression
from waterflow.capture.tracing import capture_error, is_of_job, users_line
from waterflow.common.errors import CaptureError
from waterflow.job.job import Job
from waterflow.job.optimizer_state import Layout, hyperparameters, trained_parameters
from waterflow.partitioner.graph.effects import only_copied, seeded, writes
from waterflow.partitioner.graph.inplace import add_in_place
from waterflow.partitioner.graph.step_graph import Input, StepGraph

_aten = torch.ops.aten
#: Below autograd these return their argument; the tensor itself serves.
_SAME_TENSOR = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_READ_SCALAR = _aten._local_scalar_dense.default


def gradient_layouts(job: Job, forward: ForwardTrace) -> list[Layout | None]:
    """Layout of the gradient of each of the optimizer's parameters, None where there is none."""
    nodes = _gradients_by_parameter(job, forward)
    return [
        None if (node := nodes.get(id(parameter))) is None else Layout.of(node.meta["val"])
        for parameter in trained_parameters(job.optimizer)
    ]


def join(job: Job, forward: ForwardTrace, optimizer: OptimizerTrace | None) -> StepGraph:
    """Joins the traces into one step graph.

    Args:
        job: whose step it is.
        forward: its forward and backward pass.
        optimizer: its optimizer's step; None leaves the gradients as outputs. Of a whole step
            (`ForwardTrace.is_whole`) what is live in it.

    Raises:
        CaptureError: the step uses a tensor that cannot be an input of the graph.
    """
    return _Join(job, forward, optimizer).run()


def _gradients_by_parameter(job: Job, forward: ForwardTrace) -> dict[int, fx.Node | None]:
    parameters, _ = named_tensors(job.root)
    pairs = zip(parameters.values(), forward.gradients, strict=True)
    return {id(parameter): node for parameter, node in pairs}


class _Join:
    def __init__(self, job: Job, forward: ForwardTrace, optimizer: OptimizerTrace | None) -> None:
        self.job = job
        self.forward = forward
        self.optimizer = optimizer
        self.graph = fx.Graph()
        self.inputs: dict[Input, fx.Node] = {}
        self.constants: list[torch.Tensor] = []
        self.constant_inputs: dict[Hashable, Input] = {}
        self.expressions: dict[Expression, fx.Node] = {}
        self.elements: dict[Any, fx.Node] = {}  # each element of a result is taken out once
        self.mutated: set[Input] = set()
        self.scalars: dict[str, fx.Node] = {}  # the copied reads of scalars, by name
        self.live_nodes = {name for name, _ in optimizer.constants} if optimizer else set()
        named = [*job.root.named_parameters(), *job.root.named_buffers()]
        self.own_tensors = {id(tensor): name for name, tensor in named}

    def run(self) -> StepGraph:
        forward_map, forward_end = self._copy_forward()
        outputs: dict[Hashable, fx.Node] = {}
        plain: dict[tuple[int, Any], Any] = {}
        if not self.forward.is_whole:
            outputs, plain = self._add_update(forward_map)
        loss = forward_map[self.forward.loss]
        self.graph.output((loss, tuple(outputs.values())))
        _eliminate_dead(self.graph, self.mutated)
        add_in_place(self.graph, kept=(loss, *outputs.values()))
        self._drop_unused_inputs()
        return StepGraph(
            graph=self.graph,
            loss=loss,
            outputs=outputs,
            forward_end=_first_alive(self.graph, forward_end),
            constants=self.constants,
            mutated=self.mutated,
            plain_state=plain,
            metrics=self.forward.metrics,
        )

    def _add_update(
        self, forward_map: Mapping[fx.Node, fx.Node]
    ) -> tuple[dict[Hashable, fx.Node], dict[tuple[int, Any], Any]]:
        """Adds the optimizer's step; returns what the whole step leaves behind."""
        found = _gradients_by_parameter(self.job, self.forward)
        gradients = {
            index: forward_map[node]
            for index, parameter in enumerate(trained_parameters(self.job.optimizer))
            if (node := found.get(id(parameter))) is not None
        }
        if self.optimizer is None:
            return {("gradient", index): node for index, node in gradients.items()}, {}
        optimizer_map = self._copy_optimizer(self.optimizer, gradients)
        outputs: dict[Hashable, fx.Node] = {
            key: optimizer_map[node] for key, node in self.optimizer.outputs.items()
        }
        return outputs, _plain_state(self.optimizer)

    def _copy_forward(self) -> tuple[dict[fx.Node, fx.Node], list[fx.Node]]:
        recording = self.forward.recording
        live = self.optimizer if self.forward.is_whole else None
        placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
        mapping: dict[fx.Node, fx.Node] = {}
        for node, meaning in zip(placeholders, self.forward.inputs, strict=True):
            mapping[node] = self._input(meaning, node.meta["val"])
        backward: list[fx.Node] = []
        for position, node in enumerate(recording.graph.nodes):
            copied = self._copy(recording, node, mapping, live)
            if copied is not None and position >= self.forward.backward_start:
                backward.append(copied)
        self._note_mutated(recording, mapping)
        return mapping, backward

    def _copy_optimizer(
        self, optimizer: OptimizerTrace, gradients: Mapping[int, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        names = {id(p): name for name, p in self.job.root.named_parameters()}
        parameters = trained_parameters(self.job.optimizer)
        recording = optimizer.recording
        placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
        mapping: dict[fx.Node, fx.Node] = {}
        for node, key in zip(placeholders, optimizer.inputs, strict=True):
            if key[0] == "gradient":
                mapping[node] = gradients[key[1]]
                continue
            if key[0] == "hyper":  # a learning rate that is a tensor: read where it lives
                mapping[node] = self._constant(hyperparameters(self.job.optimizer)[key[1]])
                continue
            meaning = Input("state", key[1:])
            if key[0] == "parameter":
                meaning = Input("parameter", names.get(id(parameters[key[1]]), key[1]))
            mapping[node] = self._input(meaning, optimizer.value_of(node))
        for node in recording.graph.nodes:
            self._copy(recording, node, mapping, optimizer)
        self._note_mutated(recording, mapping)
        return mapping

    def _note_mutated(self, recording: Recording, mapping: Mapping[fx.Node, fx.Node]) -> None:
        for node in mutated_by(recording):
            meaning = mapping[node].meta.get("input")
            if meaning is not None and meaning.is_persistent:
                self.mutated.add(meaning)

    def _copy(
        self,
        recording: Recording,
        node: fx.Node,
        mapping: dict[fx.Node, fx.Node],
        live: OptimizerTrace | None = None,
    ) -> fx.Node | None:
        if node.op in ("placeholder", "output"):
            return None
        if node.op == "get_attr":
            tensor = recording.constant_of(node)
            if recording is self.forward.recording:
                tensor = self.forward.stand_ins.get(id(tensor), tensor)
            elif only_copied(node) and not isinstance(tensor, FakeTensor):
                tensor = tensor.clone()  # the trace may be another job's, too
            mapping[node] = self._constant(tensor, node)
            return None
        if node.target in _SAME_TENSOR:
            mapping[node] = mapping[node.args[0]]  # type: ignore[index]
            return None
        self._check_target(node)
        args, kwargs = self._with_live_numbers(node, live)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: mapping.get(n, n))
        if node.target is operator.getitem and args in self.elements:
            mapping[node] = self.elements[args]
            return None
        copied = add_call(self.graph, node.target, args, kwargs)  # type: ignore[arg-type]
        if node.target is operator.getitem:
            self.elements[args] = copied
        if "val" in node.meta:
            copied.meta["val"] = node.meta["val"] if live is None else live.value_of(node)
        if "gradient_mode" in node.meta:
            copied.meta["gradient_mode"] = node.meta["gradient_mode"]
        if node.target is _READ_SCALAR:
            self.scalars[node.name] = copied
        mapping[node] = copied
        return copied

    def _check_target(self, node: fx.Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) or target is operator.getitem:
            return
        raise CaptureError(
            f"job {self.job.name!r} cannot be captured: its step uses {target}, which is no single "
            "operator. Give the job capture=False (same numbers, no memory flow)."
        )

    def _with_live_numbers(self, node: fx.Node, live: OptimizerTrace | None) -> tuple[Any, Any]:
        if live is None or node.name not in self.live_nodes:
            return node.args, node.kwargs
        args = self._live(live, node.name, tuple(node.args), (0,))
        return args, self._live(live, node.name, dict(node.kwargs), (1,))

    def _live(self, live: OptimizerTrace, name: str, value: Any, path: tuple[Any, ...]) -> Any:
        """A value among a node's arguments, with expressions in place of numbers that were live."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._live(live, name, v, (*path, i)) for i, v in enumerate(value))
        if isinstance(value, dict):
            return {k: self._live(live, name, v, (*path, k)) for k, v in value.items()}
        expression = live.constants.get((name, path))
        return value if expression is None else self._emit(expression)

    def _emit(self, expression: Expression) -> Any:
        if expression[0] == "number":
            return expression[1]
        if expression[0] == "item":
            return self.scalars[expression[1]]
        if expression[0] == "hyper":
            return self._input(Input("hyper", expression[1]), None)
        if expression not in self.expressions:
            operands = tuple(map(self._emit, expression[1:]))
            node = add_call(self.graph, ARITHMETIC[expression[0]], operands)
            self.expressions[expression] = node
        return self.expressions[expression]

    def _input(self, meaning: Input, value: Any) -> fx.Node:
        if meaning not in self.inputs:
            with self.graph.inserting_before(self._first_operation()):
                node = self.graph.placeholder(f"{meaning.kind}_{len(self.inputs)}")
            node.meta["input"] = meaning
            if value is not None:
                node.meta["val"] = value
            self.inputs[meaning] = node
        return self.inputs[meaning]

    def _first_operation(self) -> fx.Node:
        for node in self.graph.nodes:
            if node.op != "placeholder":
                return node
        return self.graph._root

    def _constant(self, tensor: torch.Tensor, node: fx.Node | None = None) -> fx.Node:
        if isinstance(tensor, FakeTensor) and not is_of_job(tensor):
            raise capture_error(
                self.job.name,
                "it keeps a tensor of the capture itself",
                users_line(None, self.job.function),
            )
        if id(tensor) in self.own_tensors:
            name = self.own_tensors[id(tensor)]
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            return self._input(Input(kind, name), tensor)
        key = _identity(tensor, node)
        if key not in self.constant_inputs:
            self.constant_inputs[key] = Input("constant", len(self.constants))
            self.constants.append(tensor)
        return self._input(self.constant_inputs[key], tensor)

    def _drop_unused_inputs(self) -> None:
        for meaning, node in list(self.inputs.items()):
            if not node.users:
                self.graph.erase_node(node)
                self.mutated.discard(meaning)


def _identity(tensor: torch.Tensor, node: fx.Node | None) -> Hashable:
    """Constants are told apart by identity; numbers that the step only copies, by their value."""
    copied = node is not None and only_copied(node)
    if copied and tensor.numel() == 1 and not isinstance(tensor, FakeTensor):
        return tensor.dtype, tuple(tensor.shape), repr(tensor.item())
    return id(tensor)


def _plain_state(optimizer: OptimizerTrace) -> dict[tuple[int, Any], Any]:
    return {
        (index, key): value
        for index, entries in enumerate(optimizer.state_after)
        for key, value in entries.items()
        if not isinstance(value, Layout)
    }


def _eliminate_dead(graph: fx.Graph, mutated: set[Input]) -> None:
    """Drops what nobody reads; writes and draws of random numbers stay, whoever reads them.

    A write into a tensor that nobody reads afterwards stays too: cheap, and always right.
    """
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if not writes(node) and not seeded(node):
            graph.erase_node(node)


def _first_alive(graph: fx.Graph, candidates: Sequence[fx.Node]) -> fx.Node | None:
    alive = set(graph.nodes)
    return next((node for node in candidates if node in alive), None)
