"""Compiles a step graph to a tape of the extension, which runs without the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from waterflow.allocator_ext import _C
from waterflow.executor.device.storages import over
from waterflow.executor.run.instructions import (
    CallOperator,
    Compute,
    Instruction,
    Load,
    LoweredStep,
    MoveStorage,
    ReadLoss,
    ReadScalar,
    lower_step,
)
from waterflow.partitioner.graph.step_graph import Input, StepGraph


@dataclass(eq=False)
class CompiledStep:
    """A step graph as a tape, and where its values are.

    Attributes:
        tape: the extension's tape.
        lowered: what it was made of.
        inputs: slot of each persistent input.
        registers: register of each live hyperparameter.
        outputs: slot of each output of the step graph.
        transient: slots that a failed step may leave filled.
        boundary: first instruction of the backward pass, None if there is none.
        names: an operator's name per instruction.
        device_input: where its batch arrives, None where it is on the device already.
        away: values that are away between steps, with the inputs over each (`spilled_step`).
    """

    tape: Any
    lowered: LoweredStep
    inputs: dict[Input, int] = field(default_factory=dict)
    registers: dict[Hashable, int] = field(default_factory=dict)
    outputs: dict[Hashable, int] = field(default_factory=dict)
    transient: list[int] = field(default_factory=list)
    boundary: int | None = None
    names: list[str] = field(default_factory=list)
    device_input: Any = None
    away: Mapping[int, tuple[Input, ...]] = field(default_factory=dict)

    def bind(self, tensors: Mapping[Input, torch.Tensor]) -> None:
        """Puts persistent tensors into their slots, and views of them that never change.

        Aliases of them, in fact: what the user does with a tensor itself (swaps it for another,
        say) may depend on nobody else holding it.
        """
        stand_ins: dict[Input, torch.UntypedStorage] = {}
        for value, meanings in self.away.items():
            stand_in = self.tape.keep_away(value, tensors[meanings[0]]).untyped_storage()
            stand_ins.update(dict.fromkeys(meanings, stand_in))
        for meaning, slot in self.inputs.items():
            tensor = tensors[meaning]
            if meaning in stand_ins:
                tensor = over(tensor.detach(), stand_ins[meaning])
            self.tape.set_alias(slot, tensor)
        for slot, make in self._views:
            with torch.no_grad():
                self.tape.set_slot(slot, make())

    def unbind(self) -> None:
        """Lets go of every tensor."""
        self.tape.clear([*self.inputs.values(), *(slot for slot, _ in self._views)])
        self.tape.clear(self.transient)
        self.tape.set_batch([])
        self.tape.forget_away()

    _views: list[tuple[int, Callable[[], torch.Tensor]]] = field(default_factory=list)


def compile_step(step: StepGraph, lowered: LoweredStep | None = None) -> CompiledStep:
    """Compiles a step graph; the tape runs the nodes in the graph's order.

    Args:
        step: the step graph.
        lowered: its instructions, where they are known from another job with this graph.
    """
    lowered = lowered or lower_step(step)
    tape = _C.Tape(len(lowered.slots), lowered.num_registers)
    for instruction in lowered.instructions:
        _emit(tape, instruction)
    tape.set_transient(lowered.transient)
    tape.set_gradient_switches(lowered.gradient_switches)  # kernels ask for gradient mode
    for register, value in lowered.constants.items():
        tape.set_register(register, value)
    return CompiledStep(
        tape,
        lowered,
        inputs=lowered.inputs,
        registers=lowered.hypers,
        outputs=lowered.outputs,
        transient=lowered.transient,
        boundary=lowered.boundary,
        names=lowered.names,
        _views=[(lowered.slots[node], _view_maker(tape, lowered, node)) for node in lowered.views],
    )


def _emit(tape: _C.Tape, instruction: Instruction) -> None:
    match instruction:
        case CallOperator(_, operator, arguments, results, release):
            tape.add_operator(operator.name, operator.overload, arguments, results, release)
        case Compute(_, operation, register, left, right, release):
            tape.add_arithmetic(operation, register, left, right, release)
        case ReadScalar(_, slot, register, release):
            tape.add_read_scalar(slot, register, release)
        case Load(_, place, slot, release):
            tape.add_load(place, slot, release)
        case ReadLoss(_, slot, release):
            tape.add_read_loss(slot, release)
        case MoveStorage(_, end, value, slot, home, copies, _):
            tape.add_move(end, value, slot, home, copies)


def _view_maker(tape: _C.Tape, lowered: LoweredStep, node: fx.Node) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        args, kwargs = fx.map_arg(  # type: ignore[misc]
            (node.args, node.kwargs), lambda source: tape.slot(lowered.slots[source])
        )
        return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]

    return make
