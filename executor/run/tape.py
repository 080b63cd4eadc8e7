"""Compiles a step graph to a tape: operators resolved once, arguments in slots, releases listed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from waterflow.allocator_ext import _C
from waterflow.partitioner.graph.step_graph import Input, StepGraph, tensors_of

_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_ARITHMETIC: Mapping[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.pow: "^",
    operator.neg: "n",
}

#: An argument for the extension: (kind, payload).
Argument = tuple[str, Any]


@dataclass(eq=False)
class CompiledStep:
    """A step graph as a tape, and where its values are.

    Attributes:
        tape: the extension's tape.
        inputs: slot of each persistent input.
        registers: register of each live hyperparameter.
        outputs: slot of each output of the step graph.
        transient: slots that a failed step may leave filled.
        boundary: first instruction of the backward pass, None if there is none.
        names: an operator's name per instruction.
        inbox: where its batch arrives, None where it is on the device already.
    """

    tape: Any
    inputs: dict[Input, int] = field(default_factory=dict)
    registers: dict[Hashable, int] = field(default_factory=dict)
    outputs: dict[Hashable, int] = field(default_factory=dict)
    transient: list[int] = field(default_factory=list)
    boundary: int | None = None
    names: list[str] = field(default_factory=list)
    inbox: Any = None

    def bind(self, tensors: Mapping[Input, torch.Tensor]) -> None:
        """Puts persistent tensors into their slots, and views of them that never change.

        Aliases of them, in fact: what the user does with a tensor itself (swaps it for another,
        say) may depend on nobody else holding it.
        """
        for meaning, slot in self.inputs.items():
            self.tape.set_slot(slot, tensors[meaning].detach())
        for slot, make in self._views:
            with torch.no_grad():
                self.tape.set_slot(slot, make())

    def unbind(self) -> None:
        """Lets go of every tensor."""
        self.tape.clear([*self.inputs.values(), *(slot for slot, _ in self._views)])
        self.tape.clear(self.transient)
        self.tape.set_batch([])

    _views: list[tuple[int, Callable[[], torch.Tensor]]] = field(default_factory=list)


def compile_step(step: StepGraph) -> CompiledStep:
    """Compiles a step graph; the tape runs the nodes in the graph's order."""
    return _Compiler(step).run()


class _Compiler:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.slots: dict[fx.Node, int] = {}
        self.registers: dict[fx.Node | float, int] = {}
        self.constants: dict[int, float] = {}
        self.kept = {step.loss, *step.outputs.values()}
        self.views = self._views_of_persistent()
        self.last_use = self._last_uses()

    def run(self) -> CompiledStep:
        self._assign()
        tape = _C.Tape(len(self.slots), len(self.registers))
        compiled = CompiledStep(tape)
        self._bind_inputs(compiled)
        self._add_loads(compiled)
        forward_length = None
        for node in self.step.nodes:
            if node is self.step.forward_end:  # it may be a view or getitem, no instruction itself
                forward_length = len(tape)
            self._add(compiled, node)
        loss_release = [] if self.step.loss in self.step.outputs.values() else [self.step.loss]
        tape.add_read(True, self.slots[self.step.loss], -1, [self.slots[n] for n in loss_release])
        compiled.names.append("loss")
        compiled.boundary = forward_length
        tape.set_forward_length(len(tape) if forward_length is None else forward_length)
        for register, value in self.constants.items():
            tape.set_register(register, value)
        compiled.outputs = {key: self.slots[node] for key, node in self.step.outputs.items()}
        return compiled

    # Which slot, which register

    def _views_of_persistent(self) -> dict[fx.Node, fx.Node]:
        """View nodes whose every tensor argument is persistent: made once, outside the step."""
        found: dict[fx.Node, fx.Node] = {}
        persistent = {n for m, n in self.step.inputs.items() if m.is_persistent}
        for node in self.step.nodes:
            if not _is_view(node) or node in self.kept:
                continue
            if all(source in persistent for source in node.all_input_nodes):
                found[node] = node
                persistent.add(node)
        return found

    def _last_uses(self) -> dict[fx.Node, fx.Node]:
        """For each value the node that reads it last, in one reverse walk (through getitem)."""
        last: dict[fx.Node, fx.Node] = {}
        for node in reversed(self.step.nodes):
            if node.target is operator.getitem:
                continue
            for source in node.all_input_nodes:
                last.setdefault(source, node)
        return last

    def _assign(self) -> None:
        for meaning, node in self.step.inputs.items():
            if meaning.kind == "hyper":
                self.registers[node] = len(self.registers)
            else:
                self.slots[node] = len(self.slots)
        for node in self.step.nodes:
            if node.target is _READ_SCALAR or node.target in _ARITHMETIC:
                self.registers[node] = len(self.registers)
                for argument in node.args:
                    if isinstance(argument, (int, float)):
                        self._constant_register(float(argument))
            elif not _has_several(node):
                self.slots[node] = len(self.slots)

    def _constant_register(self, value: float) -> int:
        if value not in self.registers:
            self.constants[len(self.registers)] = value
            self.registers[value] = len(self.registers)
        return self.registers[value]

    # Instructions

    def _bind_inputs(self, compiled: CompiledStep) -> None:
        fixed = set()
        for meaning, node in self.step.inputs.items():
            if meaning.is_persistent:
                compiled.inputs[meaning] = self.slots[node]
                fixed.add(self.slots[node])
            elif meaning.kind == "hyper":
                compiled.registers[meaning.key] = self.registers[node]
        for node in self.views:
            compiled._views.append((self.slots[node], self._view_maker(compiled, node)))
            fixed.add(self.slots[node])
        compiled.transient = [slot for slot in self.slots.values() if slot not in fixed]
        compiled.tape.set_transient(compiled.transient)
        self.fixed = fixed

    def _view_maker(self, compiled: CompiledStep, node: fx.Node) -> Callable[[], torch.Tensor]:
        slots, tape = self.slots, compiled.tape

        def make() -> torch.Tensor:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tape.slot(slots[n]))  # type: ignore[misc]
            return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]

        return make

    def _add_loads(self, compiled: CompiledStep) -> None:
        for meaning, node in self.step.inputs.items():
            if meaning.kind == "batch":
                slot = self.slots[node]
                compiled.tape.add_load(meaning.key, slot, [])
                compiled.names.append("load")

    def _add(self, compiled: CompiledStep, node: fx.Node) -> None:
        if node.target is operator.getitem or node in self.views:
            return
        release = self._release(node)
        if node.target is _READ_SCALAR:
            source = node.args[0]
            compiled.tape.add_read(False, self.slots[source], self.registers[node], release)  # type: ignore[index]
        elif node.target in _ARITHMETIC:
            operands = [self._register(argument) for argument in node.args]
            left, right = (*operands, -1)[:2]
            symbol = _ARITHMETIC[node.target]
            compiled.tape.add_arithmetic(symbol, self.registers[node], left, right, release)
        else:
            self._add_operator(compiled, node, release)
        compiled.names.append(str(node.target))

    def _release(self, node: fx.Node) -> list[int]:
        dying = [source for source in node.all_input_nodes if self.last_use[source] is node]
        unread = [n for n in _values(node) if n in self.slots and n not in self.last_use]
        return [
            self.slots[n]
            for n in dict.fromkeys([*dying, *unread])
            if n in self.slots and n not in self.kept and self.slots[n] not in self.fixed
        ]

    def _register(self, argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return self.registers[argument]
        return self._constant_register(float(argument))

    def _add_operator(self, compiled: CompiledStep, node: fx.Node, release: list[int]) -> None:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        schema = target._schema
        values = [_argument_value(node, i, argument) for i, argument in enumerate(schema.arguments)]
        arguments = [self._argument(v) for v in values]
        for place, argument in enumerate(schema.arguments):
            if argument.name == "generator" and values[place] is None:
                arguments[place] = ("generator", _on_device(node))
        compiled.tape.add_operator(
            schema.name,
            schema.overload_name,
            arguments,
            self._results(node, schema),
            release,
        )

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, fx.Node):
            if value in self.registers:
                return "register", self.registers[value]
            return "slot", self.slots[value]
        if isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
            return self._list_argument(value)
        return "constant", value

    def _list_argument(self, values: Sequence[Any]) -> Argument:
        if any(v in self.registers for v in values if isinstance(v, fx.Node)):
            pairs = [
                (self.registers[v], 0.0) if isinstance(v, fx.Node) else (-1, float(v))
                for v in values
            ]
            return "registers", pairs
        return "slots", [-1 if v is None else self.slots[v] for v in values]

    def _results(self, node: fx.Node, schema: Any) -> list[Any]:
        """Per return: the slot it goes to, -1 for nowhere, or a list of slots for a tensor list."""
        readers = {n.args[1]: n for n in node.users if n.target is operator.getitem}
        if len(schema.returns) == 1:
            if not _has_several(node):
                return [self.slots[node]]
            return [self._elements(readers, len(node.meta["val"]))]
        results: list[Any] = []
        for place, value in enumerate(node.meta.get("val") or [None] * len(schema.returns)):
            reader = readers.get(place)
            if isinstance(value, (list, tuple)):
                inner = {n.args[1]: n for n in reader.users} if reader else {}
                results.append(self._elements(inner, len(value)))
            else:
                results.append(self.slots.get(reader, -1) if reader else -1)
        return results

    def _elements(self, readers: Mapping[Any, fx.Node], count: int) -> list[int]:
        return [self.slots[readers[i]] if i in readers else -1 for i in range(count)]


def _argument_value(node: fx.Node, place: int, argument: Any) -> Any:
    if place < len(node.args):
        return node.args[place]
    if argument.name in node.kwargs:
        return node.kwargs[argument.name]
    return argument.default_value


def _on_device(node: fx.Node) -> bool:
    """Whether an operator works on a device other than the host."""
    return any(tensor.device.type != "cpu" for tensor in tensors_of(node))


def _has_several(node: fx.Node) -> bool:
    """Whether a node's value is a tuple or list, taken apart by getitem nodes."""
    return isinstance(node.meta.get("val"), (list, tuple))


def _values(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold a node's results."""
    if not _has_several(node):
        return [node]
    return [reader for user in node.users for reader in _values(user)]


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
        return False
    return not _has_several(node)
