"""A step graph lowered for execution: a list of instructions over slots and registers.

Slots hold tensors, registers numbers. The tape executes the instructions (`tape`), the fake
profiler only follows what they allocate and free (`profile.fake`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from waterflow.allocator_ext import _C
from waterflow.partitioner.graph.step_graph import Input, StepGraph, tensors_of

_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_ARITHMETIC: Mapping[Any, _C.Arithmetic] = {
    operator.add: _C.Arithmetic.ADD,
    operator.sub: _C.Arithmetic.SUBTRACT,
    operator.mul: _C.Arithmetic.MULTIPLY,
    operator.truediv: _C.Arithmetic.DIVIDE,
    operator.pow: _C.Arithmetic.POWER,
    operator.neg: _C.Arithmetic.NEGATE,
}

#: A number beside a tensor is cast to the type of the result, by these at every call.
_WITH_NUMBERS = {
    getattr(torch.ops.aten, name + suffix).Tensor
    for name in ("add", "sub", "mul", "div")
    for suffix in ("", "_")
}
#: Whole numbers up to this size are doubles, too.
_LARGEST_WHOLE = 2**53

NOWHERE = -1
"""The slot of a result that nobody reads, the register of an operand that is not there."""


class Argument(NamedTuple):
    """Where an operator's argument comes from, in the form of the extension's tape.

    The payload is, by kind: CONSTANT the value; SLOT its number; SLOTS their numbers, `NOWHERE` for
    a missing tensor; SCALAR a register; SCALARS pairs of a register and a number, which counts
    where the register is `NOWHERE`; SINGLE one such pair, the number cast to float32; GENERATOR
    whether it is the device's.
    """

    kind: _C.ArgumentKind
    payload: Any


@functools.lru_cache(maxsize=1 << 14)
def _from_slot(slot: int) -> Argument:
    """A tensor's; one for all tapes, so that there are fewer objects for collections to pass."""
    return Argument(_C.ArgumentKind.SLOT, slot)


@functools.lru_cache(maxsize=1 << 14)
def _from_register(register: int) -> Argument:
    """A number's, so, too."""
    return Argument(_C.ArgumentKind.SCALAR, register)


_NONE = Argument(_C.ArgumentKind.CONSTANT, None)


@dataclass(frozen=True, eq=False)
class Signature:
    """An operator as its schema describes it.

    Attributes:
        name: with its namespace.
        overload: the overload's name.
        parameters: the name and the default of each argument.
        generator: the place of its random generator, None if it has none.
        num_returns: how many values it returns.
    """

    name: str
    overload: str
    parameters: Sequence[tuple[str, Argument]]
    generator: int | None
    num_returns: int


@functools.cache  # a schema makes its lists anew each time that it is asked
def signature_of(target: torch._ops.OpOverload) -> Signature:
    """The signature of an operator."""
    schema = target._schema
    names = [argument.name for argument in schema.arguments]
    defaults = [
        Argument(_C.ArgumentKind.CONSTANT, argument.default_value) for argument in schema.arguments
    ]
    return Signature(
        schema.name,
        schema.overload_name,
        list(zip(names, defaults, strict=True)),
        names.index("generator") if "generator" in names else None,
        len(schema.returns),
    )


class Load(NamedTuple):
    """Copies a tensor of the batch, the one of place `input`, into a slot."""

    node: fx.Node
    input: int
    slot: int
    release: Sequence[int]

    @property
    def name(self) -> str:
        """As profiles have it."""
        return "load"


class CallOperator(NamedTuple):
    """Calls an operator. `results` has per return a slot, or a list of slots for a tensor list."""

    node: fx.Node
    signature: Signature
    arguments: tuple[Argument, ...]
    results: tuple[int | list[int], ...]
    release: Sequence[int]

    @property
    def name(self) -> str:
        """As profiles have it."""
        return str(self.node.target)


class ReadScalar(NamedTuple):
    """Puts the number in a slot's tensor into a register."""

    node: fx.Node
    slot: int
    register: int
    release: Sequence[int]

    @property
    def name(self) -> str:
        """As profiles have it."""
        return str(self.node.target)


class Compute(NamedTuple):
    """Computes with registers; `right` is `NOWHERE` where there is one operand."""

    node: fx.Node
    operation: _C.Arithmetic
    register: int
    left: int
    right: int
    release: Sequence[int]

    @property
    def name(self) -> str:
        """As profiles have it."""
        return str(self.node.target)


class ReadLoss(NamedTuple):
    """Reads the step's loss from a slot; the last instruction."""

    node: fx.Node
    slot: int
    release: Sequence[int]

    @property
    def name(self) -> str:
        """As profiles have it."""
        return "loss"


class MoveStorage(NamedTuple):
    """One end of a move of a storage to the slower tier, or back; see `runtime/spill.h`.

    `slot` holds a tensor over it where a transient one leaves for its `home`, an offset in the
    tier; `copies` says whether other bytes are there.
    """

    node: fx.Node
    end: _C.MoveEnd
    value: int
    slot: int
    home: int
    copies: bool
    release: Sequence[int] = ()

    @property
    def name(self) -> str:
        """As profiles have it."""
        return f"spill.{self.end.name.lower()}"


Instruction = Load | CallOperator | ReadScalar | Compute | ReadLoss | MoveStorage
"""All name the slots that are released after them, and the node that they come from."""


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """A step graph as instructions, and where its values are.

    Attributes:
        instructions: in the order in which they run.
        slots: the slot of each node that holds a tensor.
        num_registers: how many there are.
        inputs: slot of each persistent input.
        hypers: register of each live hyperparameter.
        constants: number of each register that never changes.
        outputs: slot of each output of the step graph.
        views: nodes that are views of persistent tensors, made once, before any step.
        transient: slots that hold values only while a step runs, outputs among them.
        boundary: first instruction of the backward pass, None if there is none.
        gradient_switches: instructions before which gradient mode is switched; it is on at first.
    """

    instructions: Sequence[Instruction]
    slots: Mapping[fx.Node, int]
    num_registers: int
    inputs: dict[Input, int]
    hypers: dict[Hashable, int]
    constants: Mapping[int, float]
    outputs: dict[Hashable, int]
    views: Sequence[fx.Node]
    transient: list[int]
    boundary: int | None
    gradient_switches: Sequence[int]

    @functools.cached_property
    def names(self) -> list[str]:
        """An operator's name per instruction."""
        return [instruction.name for instruction in self.instructions]


def lower_step(step: StepGraph) -> LoweredStep:
    """Lowers a step graph; the instructions keep the graph's order of nodes."""
    return _Lowering(step).run()


def slots_read(instruction: Instruction) -> list[int]:
    """The slots whose tensors an instruction is given."""
    if isinstance(instruction, (ReadScalar, ReadLoss)):
        return [instruction.slot]
    if not isinstance(instruction, CallOperator):
        return []
    found: list[int] = []
    for kind, payload in instruction.arguments:
        if kind == _C.ArgumentKind.SLOT:
            found.append(payload)
        elif kind == _C.ArgumentKind.SLOTS:
            found += [slot for slot in payload if slot != NOWHERE]
    return found


def slots_written(instruction: Instruction) -> list[int]:
    """The slots that an instruction puts tensors into."""
    if isinstance(instruction, Load):
        return [instruction.slot]
    if not isinstance(instruction, CallOperator):
        return []
    nested = [one if isinstance(one, list) else [one] for one in instruction.results]
    return [slot for slots in nested for slot in slots if slot != NOWHERE]


def holders_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold a node's results: itself, or those that take its tuple or list apart."""
    if not _has_several(node):
        return [node]
    return [reader for user in node.users for reader in holders_of(user)]


def has_single(node: fx.Node) -> bool:
    """Whether an operator on the host is given its number as a float32, and need not cast it.

    Only beside tensors of that type: of shorter ones the kernels look at the number itself.
    """
    if node.target not in _WITH_NUMBERS or len(node.args) < 2:
        return False
    tensor, number = node.args[:2]
    value = tensor.meta.get("val") if isinstance(tensor, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    return value.device.type == "cpu" and _is_real(number)


def _is_real(value: Any) -> bool:
    """Whether an argument is a number whose double says all of it."""
    if isinstance(value, fx.Node):
        return _is_register(value)
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST_WHOLE)


def _is_register(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(node.meta["input"].kind == "hyper")
    return node.target is _READ_SCALAR or node.target in _ARITHMETIC


class _Lowering:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.slots: dict[fx.Node, int] = {}
        self.registers: dict[fx.Node | float, int] = {}
        self.constants: dict[int, float] = {}
        self.kept = {step.loss, *step.outputs.values()}
        self.views = self._views_of_persistent()
        self.last_use = self._last_uses()
        self._assign()
        fixed = [node for meaning, node in step.inputs.items() if meaning.is_persistent]
        self.fixed = {self.slots[node] for node in [*fixed, *self.views]}

    def run(self) -> LoweredStep:
        inputs, slots = self.step.inputs.items(), self.slots
        instructions: list[Instruction] = [
            Load(node, meaning.key, slots[node], ())  # type: ignore[arg-type]  # a place in the batch
            for meaning, node in inputs
            if meaning.kind == "batch"
        ]
        boundary = None
        mode, switches = True, list[int]()
        for node in self.step.nodes:
            if node is self.step.forward_end:  # it may be a view or getitem, no instruction itself
                boundary = len(instructions)
            if node.target is operator.getitem or node in self.views:
                continue
            # On in the forward pass; a step of the user's own has several, and its nodes know.
            wanted = node.meta.get("gradient_mode", mode if boundary is None else False)
            if wanted != mode:
                switches.append(len(instructions))
            mode = wanted
            instructions.append(self._instruction(node))
        instructions.append(self._loss())
        return LoweredStep(
            instructions=instructions,
            slots=slots,
            num_registers=len(self.registers),
            inputs={meaning: slots[node] for meaning, node in inputs if meaning.is_persistent},
            hypers={
                meaning.key: self.registers[node]
                for meaning, node in inputs
                if meaning.kind == "hyper"
            },
            constants=self.constants,
            outputs={key: slots[node] for key, node in self.step.outputs.items()},
            views=list(self.views),
            transient=[slot for slot in slots.values() if slot not in self.fixed],
            boundary=boundary,
            gradient_switches=switches,
        )

    # Which slot, which register

    def _views_of_persistent(self) -> dict[fx.Node, None]:
        """View nodes whose every tensor argument is persistent: made once, outside the step."""
        found: dict[fx.Node, None] = {}
        persistent = {n for m, n in self.step.inputs.items() if m.is_persistent}
        for node in self.step.nodes:
            if not _is_view(node) or node in self.kept:
                continue
            if all(source in persistent for source in node.all_input_nodes):
                found[node] = None
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
            if _is_register(node):
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

    def _instruction(self, node: fx.Node) -> Instruction:
        release = self._release(node)
        if node.target is _READ_SCALAR:
            source = node.args[0]
            return ReadScalar(node, self.slots[source], self.registers[node], release)  # type: ignore[index]
        if node.target in _ARITHMETIC:
            operands = [self._register(argument) for argument in node.args]
            left, right = (*operands, NOWHERE)[:2]
            return Compute(
                node, _ARITHMETIC[node.target], self.registers[node], left, right, release
            )
        return self._call(node, release)

    def _loss(self) -> ReadLoss:
        loss = self.step.loss
        release = () if loss in self.step.outputs.values() else (self.slots[loss],)
        return ReadLoss(loss, self.slots[loss], release)

    def _release(self, node: fx.Node) -> tuple[int, ...]:
        dying = [source for source in node.all_input_nodes if self.last_use[source] is node]
        unread = [n for n in holders_of(node) if n in self.slots and n not in self.last_use]
        return tuple(
            self.slots[n]
            for n in dict.fromkeys([*dying, *unread])
            if n in self.slots and n not in self.kept and self.slots[n] not in self.fixed
        )

    def _register(self, argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return self.registers[argument]
        return self._constant_register(float(argument))

    def _call(self, node: fx.Node, release: tuple[int, ...]) -> CallOperator:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        signature = signature_of(target)
        arguments = [self._argument(value) for value in node.args]
        for name, default in signature.parameters[len(arguments) :]:
            given = name in node.kwargs
            arguments.append(self._argument(node.kwargs[name]) if given else default)
        if has_single(node):
            arguments[1] = self._single(node.args[1])
        place = signature.generator
        if place is not None and arguments[place] == _NONE:
            arguments[place] = Argument(_C.ArgumentKind.GENERATOR, _on_device(node))
        results = self._results(node, signature.num_returns)
        return CallOperator(node, signature, tuple(arguments), results, release)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, fx.Node):
            if value in self.registers:
                return _from_register(self.registers[value])
            return _from_slot(self.slots[value])
        if isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
            return self._list_argument(value)
        return Argument(_C.ArgumentKind.CONSTANT, value)

    def _single(self, number: Any) -> Argument:
        if isinstance(number, fx.Node):
            return Argument(_C.ArgumentKind.SINGLE, (self.registers[number], 0.0))
        return Argument(_C.ArgumentKind.SINGLE, (NOWHERE, float(number)))

    def _list_argument(self, values: Sequence[Any]) -> Argument:
        if any(v in self.registers for v in values if isinstance(v, fx.Node)):
            pairs = [
                (self.registers[v], 0.0) if isinstance(v, fx.Node) else (NOWHERE, float(v))
                for v in values
            ]
            return Argument(_C.ArgumentKind.SCALARS, pairs)
        slots = [NOWHERE if v is None else self.slots[v] for v in values]
        return Argument(_C.ArgumentKind.SLOTS, slots)

    def _results(self, node: fx.Node, num_returns: int) -> tuple[int | list[int], ...]:
        if num_returns == 1 and not _has_several(node):
            return (self.slots[node],)
        readers = {n.args[1]: n for n in node.users if n.target is operator.getitem}
        if num_returns == 1:
            return (self._elements(readers, len(node.meta["val"])),)
        results: list[int | list[int]] = []
        for place, value in enumerate(node.meta.get("val") or [None] * num_returns):
            reader = readers.get(place)
            if isinstance(value, (list, tuple)):
                inner = {n.args[1]: n for n in reader.users} if reader else {}
                results.append(self._elements(inner, len(value)))
            else:
                results.append(self.slots.get(reader, NOWHERE) if reader else NOWHERE)
        return tuple(results)

    def _elements(self, readers: Mapping[Any, fx.Node], count: int) -> list[int]:
        return [self.slots[readers[i]] if i in readers else NOWHERE for i in range(count)]


def _on_device(node: fx.Node) -> bool:
    """Whether an operator works on a device other than the host."""
    return any(tensor.device.type != "cpu" for tensor in tensors_of(node))


def _has_several(node: fx.Node) -> bool:
    """Whether a node's value is a tuple or list, taken apart by getitem nodes."""
    return isinstance(node.meta.get("val"), (list, tuple))


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
        return False
    return not _has_several(node)
