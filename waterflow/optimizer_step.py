"""Captures ``optimizer.step()``: gradients, state and live hyperparameters in, updates in place."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.utils import stateless

from waterflow.forward import named_tensors
from waterflow.hyper import (
    Expression,
    Guard,
    Marks,
    bits,
    common_meaning,
    holds,
    leaves,
    mark,
    markable,
)
from waterflow.job import Job
from waterflow.tracing import TRACE_LOCK, StateWatch, fake_mode, trace

#: Where a hyperparameter lives: (group, key) or (group, key, position in its tuple).
HyperKey = tuple[Any, ...]


class NotCapturableError(Exception):
    """The optimizer's step cannot be captured exactly; it will run eagerly. Says why."""


@dataclass(frozen=True)
class Layout:
    """Shape, strides and type of a tensor: all that a trace needs of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor, real or fake."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def make(self) -> torch.Tensor:
        """A new tensor of this layout (fake, inside a fake mode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


#: Optimizer state of each trained parameter: layouts of its tensors, plain values as they are.
StateLayout = list[dict[Any, Any]]


@dataclass
class OptimizerTrace:
    """A traced optimizer step.

    Attributes:
        module: placeholders in the order of `inputs`.
        inputs: ("parameter", i), ("gradient", i) or ("state", i, key); i counts the optimizer's
            parameters.
        outputs: state created: (i, key) -> node; empty if the state was there.
        constants: expression of each constant that must be kept up to date: (node's name, path in
            its arguments) -> expression.
        items: node name -> the read of a scalar that expressions refer to.
        state_after: layouts of the state after the step.
        fixed: hyperparameters that are part of the graph, with their values.
        guards: comparisons of live hyperparameters.
    """

    module: fx.GraphModule
    inputs: list[tuple[Any, ...]]
    outputs: dict[tuple[int, Any], fx.Node]
    constants: dict[tuple[str, tuple[Any, ...]], Expression]
    state_after: StateLayout
    fixed: dict[HyperKey, Any]
    guards: list[Guard] = field(default_factory=list)

    def valid_for(self, values: Mapping[HyperKey, Any]) -> bool:
        """Whether the graph is right for these hyperparameters."""
        return (
            all(_equal(values.get(key), value) for key, value in self.fixed.items())
            and values.keys() - self.fixed.keys() == self._live(values)
            and all(holds(guard, values) for guard in self.guards)
        )

    def _live(self, values: Mapping[HyperKey, Any]) -> set[HyperKey]:
        return {key for key in values if key not in self.fixed and markable(values[key])}


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[HyperKey, Any]:
    """All hyperparameters of all groups; tuples of numbers taken apart."""
    found: dict[HyperKey, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                continue
            if isinstance(value, (tuple, list)) and all(type(v) is float for v in value):
                found.update({(index, key, place): v for place, v in enumerate(value)})
            else:
                found[index, key] = value
    return found


def state_layout(optimizer: torch.optim.Optimizer) -> StateLayout:
    """Layouts of the optimizer's present state."""
    state = optimizer.state
    return [
        {key: _layout_or_value(value) for key, value in state[p].items()} if p in state else {}
        for p in trained_parameters(optimizer)
    ]


def _layout_or_value(value: Any) -> Any:
    return Layout.of(value) if isinstance(value, torch.Tensor) else value


def _equal(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and bool(left == right))


def trace_optimizer(
    job: Job, gradients: Sequence[Layout | None], state: StateLayout
) -> OptimizerTrace:
    """Traces the job's optimizer step twice with different marks and compares.

    Args:
        job: whose optimizer it is.
        gradients: layout of each trained parameter's gradient, None where there is none.
        state: layouts of the state before the step; empty dictionaries before the first step.

    Raises:
        NotCapturableError: the step depends on values in a way that a graph cannot follow.
    """
    values = hyperparameters(job.optimizer)
    fixed = {key for key, value in values.items() if not markable(value)}
    for _ in range(len(values) + 1):
        first = _Attempt(job, gradients, state, fixed, seed=1).run()
        second = _Attempt(job, gradients, state, fixed, seed=2).run()
        broken = _guards_broken(first, values)
        if not broken:
            return _combine(first, second, {key: values[key] for key in fixed})
        fixed |= broken
    raise NotCapturableError("its control flow depends on its hyperparameters")


class _Attempt:
    """One trace of the optimizer with one set of marks."""

    def __init__(
        self,
        job: Job,
        gradients: Sequence[Layout | None],
        state: StateLayout,
        fixed: set[HyperKey],
        seed: int,
    ) -> None:
        self.job = job
        self.gradients = gradients
        self.state = state
        self.fixed = fixed
        self.real = trained_parameters(job.optimizer)
        self.marks = Marks()
        self.random = random.Random(seed)
        self.outputs: list[tuple[int, Any]] = []
        self.state_after: StateLayout = []
        self.module: fx.GraphModule
        self.inputs: list[tuple[Any, ...]] = []

    def run(self) -> _Attempt:
        mode = fake_mode()
        with TRACE_LOCK:
            twins = [mode.from_tensor(parameter, static_shapes=True) for parameter in self.real]
            arguments = self._arguments(mode, twins)
            watch = StateWatch(self.job.model)
            try:
                with torch.no_grad(), self._live_items():
                    self.module = trace(self._step, mode, arguments)
            except NotCapturableError:
                raise
            except Exception as error:
                text = str(error).strip().splitlines() or ["no message"]
                raise NotCapturableError(f"{type(error).__name__}: {text[0]}") from error
            if problem := watch.problem():
                raise NotCapturableError(problem)
        return self

    def _arguments(self, mode: Any, twins: list[FakeTensor]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for index, twin in enumerate(twins):
            self.inputs.append(("parameter", index))
            tensors.append(twin)
        with mode:
            for index, gradient in enumerate(self.gradients):
                if gradient is not None:
                    self.inputs.append(("gradient", index))
                    tensors.append(gradient.make())
            for index, entries in enumerate(self.state):
                for key, value in entries.items():
                    if isinstance(value, Layout):
                        self.inputs.append(("state", index, key))
                        tensors.append(value.make())
        return tensors

    def _step(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(self.inputs, tensors, strict=True))
        count = len(self.gradients)
        parameters = [given["parameter", index] for index in range(count)]
        for index, parameter in enumerate(parameters):
            parameter.grad = given.get(("gradient", index))
        optimizer = self.job.optimizer
        saved_groups, saved_state = optimizer.param_groups, optimizer.state
        state = self._state_for(parameters, given)
        optimizer.param_groups = self._marked_groups(parameters)
        optimizer.state = state
        try:
            with self._swapped_model(parameters):
                self._update(parameters)
        finally:
            optimizer.param_groups, optimizer.state = saved_groups, saved_state
        return self._new_state(parameters, state, given)

    def _update(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.job.clip_grad_norm)
        self.job.optimizer.step()

    def _state_for(
        self, parameters: Sequence[torch.Tensor], given: Mapping[Any, torch.Tensor]
    ) -> defaultdict[torch.Tensor, Any]:
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for index, entries in enumerate(self.state):
            if entries:
                state[parameters[index]] = {
                    key: given["state", index, key] if isinstance(value, Layout) else value
                    for key, value in entries.items()
                }
        return state

    def _marked_groups(self, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        groups, start = [], 0
        for number, group in enumerate(self.job.optimizer.param_groups):
            stop = start + len(group["params"])
            marked = {key: self._marked(number, key, value) for key, value in group.items()}
            marked["params"] = list(parameters[start:stop])
            groups.append(marked)
            start = stop
        return groups

    def _marked(self, group: int, key: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and all(type(v) is float for v in value):
            return type(value)(self._mark((group, key, i), v) for i, v in enumerate(value))
        return self._mark((group, key), value)

    def _mark(self, key: HyperKey, value: Any) -> Any:
        if key in self.fixed or not markable(value):
            return value
        return self.marks.number(mark(value, self.random), ("hyper", key))

    @contextlib.contextmanager
    def _swapped_model(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hooks of the optimizer that go through the model see the traced parameters."""
        real = {id(p): i for i, p in enumerate(self.real)}
        named, _ = named_tensors(self.job.model)
        swapped = {n: parameters[real[id(p)]] for n, p in named.items() if id(p) in real}
        with stateless._reparametrize_module(self.job.model, swapped, tie_weights=True):
            yield

    @contextlib.contextmanager
    def _live_items(self) -> Iterator[None]:
        """``tensor.item()`` on a traced tensor becomes a read in the graph and a marked number."""
        original = torch.Tensor.item
        attempt = self

        def item(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, FakeTensor) or not tensor.dtype.is_floating_point:
                return original(tensor)
            return attempt._read(tensor)

        torch.Tensor.item = item  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.item = original  # type: ignore[method-assign]

    def _read(self, tensor: FakeTensor) -> float:
        mode = get_proxy_mode()
        assert mode is not None
        slot = get_proxy_slot(tensor, mode.tracer)
        target = torch.ops.aten._local_scalar_dense.default
        proxy = mode.tracer.create_proxy("call_function", target, (slot.proxy,), {})
        return self.marks.number(self.random.uniform(5.0, 9.0), ("item", proxy.node.name))

    def _new_state(
        self,
        parameters: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, Any],
        given: Mapping[Any, torch.Tensor],
    ) -> list[torch.Tensor]:
        created: list[torch.Tensor] = []
        for index, parameter in enumerate(parameters):
            entries = state.get(parameter, {})
            self.state_after.append({k: _layout_or_value(v) for k, v in entries.items()})
            for key, value in entries.items():
                before = given.get(("state", index, key))
                if not isinstance(value, torch.Tensor):
                    self._check_plain(index, key, value)
                elif before is None:
                    self.outputs.append((index, key))
                    created.append(value)
                elif value is not before:
                    before.copy_(value)
        return created

    def _check_plain(self, index: int, key: Any, value: Any) -> None:
        """A plain value that changes with the steps would be frozen by the trace."""
        before = self.state[index].get(key, _ABSENT)
        first = not self.state[index]
        if not (first or _equal(before, value)):
            raise NotCapturableError(f"its state {key!r} is a Python value that changes")


_ABSENT = object()


def _guards_broken(attempt: _Attempt, values: Mapping[HyperKey, Any]) -> set[HyperKey]:
    """Hyperparameters whose marks changed a decision; they must be fixed."""
    broken: set[HyperKey] = set()
    for guard in attempt.marks.guards:
        found = leaves(guard.left) + leaves(guard.right)
        if any(leaf[0] == "item" for leaf in found):
            raise NotCapturableError("its control flow depends on its state, step by step")
        if not holds(guard, values):
            broken |= {leaf[1] for leaf in found}
    return broken


def _combine(first: _Attempt, second: _Attempt, fixed: dict[HyperKey, Any]) -> OptimizerTrace:
    nodes = [list(attempt.module.graph.nodes) for attempt in (first, second)]
    if [_shape(n) for n in nodes[0]] != [_shape(n) for n in nodes[1]]:
        raise NotCapturableError("its operations depend on the values of its hyperparameters")
    constants: dict[tuple[str, tuple[Any, ...]], Expression] = {}
    for one, other in zip(*nodes, strict=True):
        _match(first, second, one, (one.args, one.kwargs), (other.args, other.kwargs), (), constants)
        _match_constant(first, second, one, other)
    output = nodes[0][-1]
    return OptimizerTrace(
        module=first.module,
        inputs=first.inputs,
        outputs=dict(zip(first.outputs, output.args[0], strict=True)),
        constants=constants,
        state_after=first.state_after,
        fixed=fixed,
        guards=first.marks.guards,
    )


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return node.op, str(node.target) if node.op != "get_attr" else "", len(node.args)


def _match_constant(first: _Attempt, second: _Attempt, one: fx.Node, other: fx.Node) -> None:
    if one.op != "get_attr":
        return
    left, right = (getattr(a.module, str(n.target)) for a, n in ((first, one), (second, other)))
    if left is not right and not torch.equal(left, right):
        raise NotCapturableError("it makes a tensor of its hyperparameters")


def _match(
    first: _Attempt,
    second: _Attempt,
    node: fx.Node,
    left: Any,
    right: Any,
    path: tuple[Any, ...],
    found: dict[tuple[str, tuple[Any, ...]], Expression],
) -> None:
    """Walks two nodes' arguments side by side; a constant that differs must have a meaning."""
    if isinstance(left, (tuple, list)):
        if len(left) != len(right):
            raise NotCapturableError("its operations depend on the values of its hyperparameters")
        for place, pair in enumerate(zip(left, right, strict=True)):
            _match(first, second, node, *pair, (*path, place), found)
    elif isinstance(left, dict):
        for key in left:
            _match(first, second, node, left[key], right[key], (*path, key), found)
    elif isinstance(left, float) and isinstance(right, float):
        if bits(left) == bits(right):
            return
        meanings = [a.marks.meanings.get(bits(v), []) for a, v in ((first, left), (second, right))]
        meaning = common_meaning(*meanings)
        if meaning is None:
            raise NotCapturableError(f"it computes a number for {node.target} outside arithmetic")
        found[node.name, path] = meaning
    elif isinstance(left, fx.Node):
        if left.name != right.name:
            raise NotCapturableError("its operations depend on the values of its hyperparameters")
    elif not _equal(left, right):
        raise NotCapturableError(f"an argument of {node.target} changes with its hyperparameters")
