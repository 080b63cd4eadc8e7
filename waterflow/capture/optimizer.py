"""Captures ``optimizer.step()``: gradients, state and live hyperparameters in, updates in place."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from waterflow.account.code_names import names_in
from waterflow.account.purity import observer
from waterflow.account.trust import is_of_trusted_classes, is_trusted_code
from waterflow.allocator_ext import _C
from waterflow.capture.fast_fakes import twin_of
from waterflow.capture.recording import Recorder, Recording
from waterflow.capture.shadow import changed_attribute, shadow_optimizer
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.torchs_calls import has_hooks, has_own_step
from waterflow.capture.trace_diff import Place, live_constants, sure_constants
from waterflow.capture.traced_floats import (
    Expression,
    FloatTrace,
    Guard,
    TracedFloat,
    UnfollowableError,
    holds,
    leaves,
    odd_value,
    reader_among,
    traceable,
)
from waterflow.capture.tracing import fake_twin, reason_of, trace
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    HyperKey,
    Layout,
    NotCapturableError,
    StateLayout,
    hyperparameters,
    layout_or_value,
    numbers_of,
    same_value,
    trained_parameters,
)
from waterflow.job.several import optimizers_in
from waterflow.job.training_step import update_parameters

_ABSENT = object()
#: By what names code gets at an optimizer's numbers.
_GROUPS = frozenset({"param_groups", "state_dict", "add_param_group"})


@dataclass
class OptimizerTrace:
    """A traced optimizer step.

    Attributes:
        recording: its placeholders are in the order of `inputs`.
        inputs: ("parameter", i), ("gradient", i), ("state", i, key) or ("hyper", key) for a
            hyperparameter that is a tensor; i counts the optimizer's parameters.
        outputs: state created: (i, key) -> node; empty if the state was there.
        constants: the expression of each constant that must be kept up to date, by its place.
        state_before, state_after: layouts of the state before and after the step.
        fixed: hyperparameters that are part of the graph, with their values.
        live: all others that there were; a step that finds more, or fewer, may do otherwise.
        guards: comparisons of live hyperparameters.
        values: of each node, where the recording was made for tensors of other shapes.
    """

    recording: Recording
    inputs: list[tuple[Any, ...]]
    outputs: dict[tuple[int, Any], fx.Node]
    constants: dict[Place, Expression]
    state_before: StateLayout
    state_after: StateLayout
    fixed: dict[HyperKey, Any]
    live: frozenset[HyperKey]
    guards: list[Guard] = field(default_factory=list)
    values: Mapping[fx.Node, Any] | None = None

    def value_of(self, node: fx.Node) -> Any:
        """The (fake) tensors that a node of the recording stands for."""
        return node.meta.get("val") if self.values is None else self.values[node]

    def valid_for(self, values: Mapping[HyperKey, Any]) -> bool:
        """Whether the graph is right for these hyperparameters."""
        return (
            values.keys() == self.fixed.keys() | self.live
            and all(same_value(values[key], value) for key, value in self.fixed.items())
            and all(traceable(values[key]) for key in self.live)
            and all(holds(guard, values) for guard in self.guards)
        )


def trace_optimizer(
    job: Job,
    gradients: Sequence[Layout | None],
    state: StateLayout,
    watch: TraceWatch | None = None,
    parameters: Sequence[Layout] | None = None,
) -> OptimizerTrace:
    """Traces the job's optimizer step with odd values; twice, and compared, where one trace does
    not tell what is live.

    Args:
        job: whose optimizer it is.
        gradients: layout of each trained parameter's gradient, None where there is none.
        state: layouts of the state before the step; empty dictionaries before the first step.
        watch: what the traces run in, where others run in it, too.
        parameters: layouts to trace with, in place of those of the parameters.

    Raises:
        NotCapturableError: the step depends on values in a way that a graph cannot follow.
    """
    if watch is None:
        with TraceWatch(job) as watch:
            return trace_optimizer(job, gradients, state, watch, parameters)

    def attempt(fixed: set[HyperKey], seed: int) -> Attempt:
        return Attempt(job, gradients, state, fixed, seed, parameters).run(watch)

    return live_trace(attempt, hyperparameters(job.optimizer))


def live_trace(
    attempt: Callable[[set[HyperKey], int], Attempt],
    values: Mapping[HyperKey, Any],
) -> OptimizerTrace:
    """A trace in which it is known what is live.

    Args:
        attempt: traces with these hyperparameters as they are, and others as odd values, which
            another seed makes others.
        values: all hyperparameters, as they are.

    Raises:
        NotCapturableError: see `trace_optimizer`.
    """
    fixed = {key for key, value in values.items() if not traceable(value)}
    for _ in range(len(values) + 1):
        first = attempt(fixed, 1)
        if broken := first.unfollowed or _guards_broken(first, values):
            fixed |= broken
            continue
        held = {key: values[key] for key in fixed}
        constants = sure_constants(first.recording, first.floats, held.values(), first.updating)
        if constants is not None:
            return _combine(first, constants, first.floats.guards, held, values)
        second = attempt(fixed, 2)
        if broken := second.unfollowed or _guards_broken(second, values):
            fixed |= broken
            continue
        constants = live_constants(
            (first.recording, second.recording), (first.floats, second.floats)
        )
        guards = [*first.floats.guards, *second.floats.guards]
        return _combine(first, constants, guards, held, values)
    raise NotCapturableError("its control flow depends on its hyperparameters")


class Attempt:
    """One trace of the optimizer with one set of odd values."""

    def __init__(
        self,
        job: Job,
        gradients: Sequence[Layout | None],
        state: StateLayout,
        fixed: set[HyperKey],
        seed: int,
        parameters: Sequence[Layout] | None = None,
    ) -> None:
        self.job = job
        self.gradients = gradients
        self.state = state
        self.fixed = fixed
        self.parameters = parameters
        self.real = trained_parameters(job.optimizer)
        self.floats = FloatTrace()
        self.random = random.Random(seed)
        self.outputs: list[tuple[int, Any]] = []
        self.state_after: StateLayout = []
        self.code: Collection[CodeType] | None = None  # all that can be executed
        self.observed: _C.Observer | None = None  # the step, if others' code than torch's is in it
        self.recording: Recording
        self.recorder: Recorder
        self.inputs: list[tuple[Any, ...]] = []

    def run(self, watch: TraceWatch) -> Attempt:
        """Traces the step.

        Raises:
            NotCapturableError: it depends on values in a way that a graph cannot follow.
        """
        try:
            self.code = watch.assumptions.account.codes
            watch.run(self._trace)
        except NotCapturableError:
            raise
        except Exception as error:
            if not self.floats.lost:
                raise NotCapturableError(reason_of(error)) from error
        if problem := watch.problem():
            raise NotCapturableError(problem)
        return self

    @property
    def unfollowed(self) -> set[HyperKey]:
        """Hyperparameters that are read in ways that no traced float follows; they must be fixed.

        Raises:
            NotCapturableError: so are numbers of the state.
        """
        try:
            if self.floats.lost:
                return self.floats.keys_in(self.floats.lost)
            if not self.floats.meanings or self._reader() is None:
                return set()
            return self.floats.keys_in(self.floats.all_made())
        except UnfollowableError as error:
            raise NotCapturableError(str(error)) from None  # no bug of the optimizer's own

    def _reader(self) -> str | None:
        """What of the user's code may read a number without its noticing."""
        if self.observed is not None:
            return reader_among(self.observed.codes(), self.observed.calls())
        own = [code for code in self.code or () if not is_trusted_code(code)]
        if self._is_torchs_alone or _GROUPS.isdisjoint(names_in(own, copied=False) or _GROUPS):
            return None
        return reader_among(own)

    @property
    def updating(self) -> set[fx.Node] | None:
        """The nodes in which hyperparameters may be; None: all."""
        return None

    @property
    def created(self) -> dict[tuple[int, Any], fx.Node]:
        """The state that it creates."""
        return dict(zip(self.outputs, self.recording.outputs, strict=True))

    def _trace(self) -> None:
        mode = CaptureMode()
        arguments = self._arguments(mode)
        with torch.no_grad(), Scalars(self._read):
            self.recording = trace(self._step, mode, arguments, self.real, code=self.code)

    def _arguments(self, mode: Any) -> list[torch.Tensor]:
        given: dict[tuple[Any, ...], torch.Tensor] = {}
        for index, parameter in enumerate(self.real):
            given["parameter", index] = self._parameter(mode, index, parameter)
        for key, value in hyperparameters(self.job.optimizer).items():
            if isinstance(value, torch.Tensor):
                given["hyper", key] = self._twin(mode, value)
        with mode:
            for index, gradient in enumerate(self.gradients):
                if gradient is not None:
                    given["gradient", index] = gradient.make()
            for index, entries in enumerate(self.state):
                for key, value in entries.items():
                    if isinstance(value, Layout):
                        given["state", index, key] = value.make()
        self.inputs = list(given)
        return list(given.values())

    def _parameter(self, mode: Any, index: int, parameter: torch.Tensor) -> torch.Tensor:
        if self.parameters is None:
            return self._twin(mode, parameter)
        with mode:
            twin = self.parameters[index].make().requires_grad_(parameter.requires_grad)
        if isinstance(parameter, torch.nn.Parameter):
            twin._is_param = True  # type: ignore[attr-defined]
        return twin

    def _twin(self, mode: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return fake_twin(mode, tensor, self.job.device)
        return twin_of(mode, tensor)

    def _step(self, recorder: Recorder, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.recorder = recorder
        given = dict(zip(self.inputs, tensors, strict=True))
        count = len(self.gradients)
        parameters = [given["parameter", index] for index in range(count)]
        for index, parameter in enumerate(parameters):
            parameter.grad = given.get(("gradient", index))
        state = self._state_for(parameters, given)
        groups = self._traced_groups(parameters, given)
        if has_own_step(self.job.optimizer):
            raise NotCapturableError("its step was replaced on the object (optimizer.step = ...)")
        shadow = shadow_optimizer(self.job.optimizer, [dict(group) for group in groups], state)
        self.observed = None if self._is_torchs_alone else observer()
        with self.observed or contextlib.nullcontext():
            update_parameters(self.job, shadow)
        check_groups(groups, shadow.param_groups)
        changed = changed_attribute(shadow, self.job.optimizer)
        if changed is not None:
            raise NotCapturableError(
                f"the step changes the optimizer's attribute {changed!r}, and a captured step "
                "would not"
            )
        state = shadow.state
        return self._new_state(parameters, state, given)

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

    def _traced_groups(
        self, parameters: Sequence[torch.Tensor], given: Mapping[Any, torch.Tensor]
    ) -> list[dict[str, Any]]:
        groups, start = [], 0
        for number, group in enumerate(self.job.optimizer.param_groups):
            stop = start + len(group["params"])
            traced = {
                key: given.get(("hyper", (number, key)), self._traced(number, key, value))
                for key, value in group.items()
            }
            traced["params"] = list(parameters[start:stop])
            groups.append(traced)
            start = stop
        return groups

    def _traced(self, group: int, key: str, value: Any) -> Any:
        if numbers_of(value):
            return type(value)(self._traced_float((group, key, i), v) for i, v in enumerate(value))
        return self._traced_float((group, key), value)

    def _traced_float(self, key: HyperKey, value: Any) -> Any:
        if key in self.fixed or not traceable(value):
            return value
        return self.floats.number(odd_value(value, self.random), ("hyper", key))

    def _read(self, tensor: torch.Tensor) -> TracedFloat:
        """A read of a traced tensor becomes a read in the graph, and a traced float here."""
        if not isinstance(tensor, FakeTensor):
            raise NotCapturableError("it reads a number from a tensor that is not in its state")
        if not tensor.dtype.is_floating_point:
            raise NotCapturableError("it reads a whole number from its state")
        node = self.recorder.add_call(torch.ops.aten._local_scalar_dense.default, tensor)
        return self.floats.number(self.random.uniform(5.0, 9.0), ("item", node.name))

    def _new_state(
        self,
        parameters: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, Any],
        given: Mapping[Any, torch.Tensor],
    ) -> list[torch.Tensor]:
        if state.keys() - set(parameters):
            raise NotCapturableError("it keeps state that belongs to no parameter")
        created: list[torch.Tensor] = []
        new_plain = False
        for index, parameter in enumerate(parameters):
            entries = state.get(parameter, {})
            self.state_after.append({k: layout_or_value(v) for k, v in entries.items()})
            for key in self.state[index].keys() - entries.keys():
                raise NotCapturableError(f"it drops its state {key!r}")
            for key, value in entries.items():
                before = given.get(("state", index, key))
                if not isinstance(value, torch.Tensor):
                    if not self._is_torchs:
                        raise NotCapturableError(f"its state {key!r} is no tensor")
                    self._check_plain(index, key, value)
                    new_plain |= key not in self.state[index]
                elif before is None:
                    self.outputs.append((index, key))
                    created.append(value)
                elif value is not before:
                    before.copy_(value)
        if new_plain and not created:  # nothing would tell the first step from the later ones
            raise NotCapturableError("its state consists of Python values")
        return created

    @functools.cached_property
    def _is_torchs(self) -> bool:
        """Whether no code but torch's reads the state."""
        return all(map(is_of_trusted_classes, optimizers_in(self.job.optimizer)))

    @property
    def _is_torchs_alone(self) -> bool:
        """Whether the step is no whole one of the user's own, and no code but torch's is in it."""
        own = optimizers_in(self.job.optimizer)
        of_all = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
        is_hooked = any(of_all) or any(map(has_hooks, own))
        return self.job.step is None and self._is_torchs and not is_hooked

    def _check_plain(self, index: int, key: Any, value: Any) -> None:
        """A plain value that changes with the steps would be frozen by the trace."""
        before = self.state[index].get(key, _ABSENT)
        first = not self.state[index]
        if isinstance(value, TracedFloat) or not (first or same_value(before, value)):
            raise NotCapturableError(f"its state {key!r} is a Python value that changes")


class Scalars(TorchFunctionMode):
    """Reads of tensors go to `read`; scalars given as tensors (``alpha=-lr``) are read where
    operators would read them."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.item:
            return self._read(args[0])
        if func in _MAKERS:
            _check_made(args, kwargs or {})
        kwargs = dict(kwargs or {})
        names = ("alpha", "value") if "addc" in getattr(func, "__name__", "") else ("alpha",)
        for name in names:
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = self._read(kwargs[name])
        return func(*args, **kwargs)


#: Make a tensor of numbers at once; no operator has them.
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})


def _check_made(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A tensor made of a traced float tells two values apart if it has as many digits."""
    if kwargs.get("dtype") in (None, torch.float32, torch.float64):
        return
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, TracedFloat):
            value.lose()


# torch chooses a step's form (one tensor at a time, or many) by the tensors' types, and the forms
# may round differently on a GPU: twins count as what they stand for. For good, as a list that came
# and went with each trace would look changed to whoever looks meanwhile.
for _kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if FakeTensor not in _kinds:
        _kinds.append(FakeTensor)  # type: ignore[arg-type]


def check_groups(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """An optimizer that counts in its groups would count in the trace only."""
    for old, new in zip(before, after, strict=True):
        for key in old.keys() | new.keys():
            if old.get(key, _ABSENT) is not new.get(key, _ABSENT):
                raise NotCapturableError(f"it changes its own hyperparameter {key!r}")


def _guards_broken(attempt: Attempt, values: Mapping[HyperKey, Any]) -> set[HyperKey]:
    """Hyperparameters whose odd values changed a decision; they must be fixed."""
    broken: set[HyperKey] = set()
    for guard in dict.fromkeys(attempt.floats.guards):
        found = leaves(guard.left) + leaves(guard.right)
        if any(leaf[0] == "item" for leaf in found):
            raise NotCapturableError("its control flow depends on its state, step by step")
        if not holds(guard, values):
            broken |= {leaf[1] for leaf in found}
    return broken


def _combine(
    first: Attempt,
    constants: dict[Place, Expression],
    guards: Sequence[Guard],
    fixed: dict[HyperKey, Any],
    values: Mapping[HyperKey, Any],
) -> OptimizerTrace:
    return OptimizerTrace(
        recording=first.recording,
        inputs=first.inputs,
        outputs=first.created,
        constants=constants,
        state_before=first.state,
        state_after=first.state_after,
        fixed=fixed,
        live=frozenset(values.keys() - fixed.keys()),
        guards=list(dict.fromkeys(guards)),
    )
