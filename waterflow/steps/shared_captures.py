"""Captures that jobs of one engine share: a trial of a known architecture traces nothing.

A capture is kept with the structure of all that its job could read (`account.structure`), and given
to a job whose own structure is equal: the graphs, the optimizer's traces, the lowered instructions,
the profiles and the piles. The job gets a tape of its own, bound to its own tensors, and its own
account, so what it changes later concerns nobody else. Once an eager step of the first job has been
observed, only what that step's code can read has to be equal: a step is a function of that, so a
job for which it is equal would take the same way through the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from waterflow.account.class_parts import IdentityKey
from waterflow.capture.assumptions import Assumptions, JobStructure, Seen
from waterflow.capture.forward import ForwardTrace
from waterflow.capture.optimizer import OptimizerTrace
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.executor.plan.piled_step import Piles
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.executor.run.instructions import LoweredStep
from waterflow.executor.run.tape import compile_step
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import HyperKey, Layout, StateLayout
from waterflow.partitioner.graph.effects import only_copied
from waterflow.partitioner.graph.step_graph import Input, StepGraph
from waterflow.steps.prepared import PreparedStep, Specialization

#: So many captures are kept for jobs that are alike at first sight, and so many in all.
_MOST_ALIKE, _MOST_KEPT = 32, 64
#: So many times a job is looked at to find out whether one of them serves it.
MOST_LOOKS = 4


class Key(NamedTuple):
    """The structure of a job that a capture serves, and what counted of its state.

    Attributes:
        seen: what its steps had executed, if any were observed.
        names: the attributes that counted.
        known: the structure.
    """

    seen: Seen | None
    names: frozenset[str] | None
    known: JobStructure

    @classmethod
    def of(cls, assumptions: Assumptions, known: JobStructure) -> Key:
        """That of a job that takes this for granted."""
        return cls(assumptions.seen, assumptions.names, known.without_tensors())


@dataclass(frozen=True, eq=False)
class SharedStep:
    """A prepared step without its job.

    Attributes:
        graph: its graph; the constants are the first job's.
        lowered: its instructions.
        optimizer: the optimizer's trace in it.
        memory, piles: what it needs.
        places: of each constant its number in the job's structure; None for a number written in
            the code.
    """

    graph: StepGraph
    lowered: LoweredStep
    optimizer: OptimizerTrace | None
    memory: StepMemory
    piles: Piles
    places: tuple[int | None, ...]

    @classmethod
    def of(cls, step: PreparedStep, known: JobStructure) -> SharedStep | None:
        """What others may have of a step; None where it holds a tensor that nobody can name."""
        places = []
        nodes = step.graph.inputs
        for index, tensor in enumerate(step.graph.constants):
            number = known.structure.number_of(tensor)
            node = nodes.get(Input("constant", index))
            if number is None and node is not None and not only_copied(node):
                return None
            places.append(number)
        return cls(
            step.graph,
            step.compiled.lowered,
            step.optimizer,
            step.memory,
            step.piles,
            tuple(places),
        )

    def prepared(self, job: Job, tensors: Mapping[int, torch.Tensor]) -> PreparedStep:
        """The step for a job whose structure has these tensors."""
        constants = [
            constant.clone() if place is None else tensors[place]
            for constant, place in zip(self.graph.constants, self.places, strict=True)
        ]
        graph = dataclasses.replace(self.graph, constants=constants)
        step = PreparedStep(graph, compile_step(graph, self.lowered), self.optimizer)
        step.memory = self.memory.of_job(job.name)
        step.piles = self.piles
        return step


@dataclass(eq=False)
class SharedCapture:
    """What one job has captured, for others.

    Attributes:
        sight: how that job looks at first sight.
        owner: its name.
        forward: its forward and backward pass.
        constants: numbers of the tensors that the trace knows by reference.
        key: the structure of jobs that it serves.
        steps: by the optimizer's state before them.
        opaque_optimizer: why the optimizer runs eagerly, None where it does not.
    """

    sight: Hashable
    owner: str
    forward: ForwardTrace
    constants: Mapping[int, int]
    key: Key
    steps: dict[Hashable, SharedStep] = field(default_factory=dict)
    opaque_optimizer: str | None = None

    def for_state(
        self, state: StateLayout, values: Mapping[HyperKey, Any]
    ) -> list[SharedStep] | None:
        """The first step, if there is one, and the steady one, for an optimizer in that state.

        Args:
            state: layouts of the optimizer's state.
            values: its hyperparameters.
        """
        found: list[SharedStep] = []
        while len(found) < 2:
            key = _state_key(state) if self.opaque_optimizer is None else None
            step = self.steps.get(key)
            if step is None or not (step.optimizer is None or step.optimizer.valid_for(values)):
                return None
            found.append(step)
            if step.optimizer is None or not step.graph.outputs:
                return found
            state = step.optimizer.state_after
        return None

    def forward_of(self, tensors: Mapping[int, torch.Tensor]) -> ForwardTrace:
        """The forward and backward pass for a job whose structure has these tensors."""
        own = {known: tensors[number] for known, number in self.constants.items()}
        return dataclasses.replace(self.forward, stand_ins=own)


@dataclass(eq=False)
class Offer:
    """A capture that others may have, while checks of its first job tell what its steps read.

    Attributes:
        sight: how that job looks at first sight.
        opaque_optimizer: why the optimizer runs eagerly, None where it does not.
        assumptions: what the capture takes for granted, as widely as when it was made.
        capture: what others can have by now; None where there was nobody to have it.
        seen: what checks have seen of its steps, None before the first.
    """

    sight: Hashable
    opaque_optimizer: str | None
    assumptions: Assumptions
    capture: SharedCapture | None = None
    seen: Seen | None = None

    def made(
        self, job: Job, specialization: Specialization, key: Key, known: JobStructure
    ) -> SharedCapture | None:
        """What others may have of the capture; None where it holds what only its job has.

        Args:
            job: its job.
            specialization: the capture.
            key: what it is to serve.
            known: the structure in it, with its job's tensors.
        """
        constants = _numbered(specialization.forward, known)
        if constants is None:
            return None
        why = self.opaque_optimizer
        capture = SharedCapture(
            self.sight, job.name, specialization.forward, constants, key, opaque_optimizer=why
        )
        for step in specialization.steps:
            shared = SharedStep.of(step.as_captured, known)  # others have other limits, or none
            # By its own trace: the optimizer's may be another by now than that of the capture.
            before = None if step.optimizer is None else _state_key(step.optimizer.state_before)
            if shared is None or (before is None) != (why is not None):
                return None
            capture.steps[before] = shared
        return capture

    def note(self, job: Job, specialization: Specialization, is_last: bool) -> SharedCapture | None:
        """A check has passed: after the last one, only what the steps read has to be equal.

        Where nothing has changed since the capture was made, that is: what the steps read is then
        still what the graphs were made of.
        """
        assumptions = specialization.assumptions
        if assumptions.seen is not None:
            self.seen = assumptions.seen if self.seen is None else self.seen | assumptions.seen
        if not is_last or self.seen is None or not self.assumptions.hold():
            return None
        narrow = assumptions  # taken for the latest check, as a rule of all that was seen
        if assumptions.seen != self.seen or not assumptions.hold():
            narrow = self.assumptions.narrowed(self.seen)
        known = narrow.structure()
        return (
            None if known is None else self.made(job, specialization, Key.of(narrow, known), known)
        )


class SharedCaptures:
    """The captures of one engine that others may have: a bounded number, those used last, as trials
    of many architectures may pass through.

    Attributes:
        traces: of optimizers' steps, which are shared further than captures.
        evaluation_extents: bytes that an evaluation has needed at most, by the kind of its job.
    """

    def __init__(self, traces: OptimizerTraces | None = None) -> None:
        """Nothing is kept yet but, where they are given, optimizers' traces."""
        self.traces = traces or OptimizerTraces()
        self.evaluation_extents: dict[Hashable, int] = {}
        # By sight; in both, those used last come last. Lists are replaced, never changed.
        self._kept: dict[Hashable, list[SharedCapture]] = {}
        self._turns: weakref.WeakValueDictionary[Hashable, _Turn] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def known(self, sight: Hashable) -> list[SharedCapture]:
        """The captures of jobs that look like this, those used last first."""
        return self._kept.get(sight, [])[::-1]

    def note_use(self, capture: SharedCapture) -> None:
        """A capture has served another job."""
        with self._lock:
            known = self._kept.get(capture.sight, [])
            if capture in known:
                self._put(capture.sight, [*(one for one in known if one is not capture), capture])

    @contextlib.contextmanager
    def turn(self, sight: Hashable) -> Iterator[None]:
        """Jobs that look alike capture one after another: most need not, then."""
        with self._lock:
            turn = self._turns.get(sight)
            if turn is None:
                turn = self._turns[sight] = _Turn()
        with turn.lock:
            yield

    def add(self, capture: SharedCapture) -> None:
        """Keeps one more capture."""
        with self._lock:
            self._put(capture.sight, [*self._kept.get(capture.sight, []), capture])

    def replace(self, capture: SharedCapture | None, by: SharedCapture) -> None:
        """From now on another form of a capture is given to others, who may have had none."""
        if capture is None:
            self.add(by)
            return
        with self._lock:
            known = self._kept.get(by.sight, [])
            self._put(by.sight, [by if one is capture else one for one in known])

    def withdraw(self, capture: SharedCapture) -> None:
        """Nobody else gets a capture that has turned out wrong for its own job."""
        with self._lock:
            known = self._kept.get(capture.sight, [])
            self._put(capture.sight, [one for one in known if one is not capture])

    def _put(self, sight: Hashable, captures: list[SharedCapture]) -> None:
        """These are kept for jobs that look like this, which are used now; the lock is held."""
        self._kept.pop(sight, None)
        if captures:
            self._kept[sight] = captures[-_MOST_ALIKE:]
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))


class _Turn:
    """Whose turn it is to capture, among jobs that look alike; kept by those who want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def first_sight(job: Job, flat: FlatBatch) -> Hashable:
    """What is told at once of a job and its batch: others need not be looked at any closer."""
    return flat.signature, kind_of(job)


def kind_of(job: Job) -> Hashable:
    """The same of a job without a batch: equal for all jobs whose captures may be shared."""
    layouts = tuple(map(_layout, job.root.parameters()))
    kinds = type(job.root).__qualname__, type(job.optimizer).__qualname__
    function = getattr(job.function, "__code__", None) or IdentityKey(type(job.function))
    return kinds, layouts, function, job.rules, str(job.device)


def _layout(parameter: torch.Tensor) -> Hashable:
    shape = None if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape)
    return shape, parameter.dtype, parameter.requires_grad


def _numbered(forward: ForwardTrace, known: JobStructure) -> Mapping[int, int] | None:
    """The numbers of the tensors that a trace knows by reference, by their identities."""
    found: dict[int, int] = {}
    for node in forward.recording.graph.nodes:
        if node.op != "get_attr" or only_copied(node):
            continue
        tensor = forward.recording.constant_of(node)
        number = known.structure.number_of(tensor)
        if number is None:
            return None
        found[id(tensor)] = number
    return found


def _state_key(state: StateLayout) -> Hashable:
    """Equal for equal layouts and plain values; None where a value is not plain."""
    entries = [tuple(parameter.items()) for parameter in state]
    values: Collection[Any] = [value for items in entries for item in items for value in item]
    if not all(isinstance(value, Layout) or type(value) in _PLAIN for value in values):
        return None
    return tuple(
        tuple((key, value if isinstance(value, Layout) else repr(value)) for key, value in items)
        for items in entries
    )


_PLAIN = (str, int, float, bool, type(None))
