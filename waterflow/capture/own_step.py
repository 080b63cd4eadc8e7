"""Captures a step of the user's own as one graph: passes and updates in the order in which it
makes them.

The step is a function of the batch that knows its modules and optimizers by itself, so no shadow
can be given to it: it runs as it is, and wherever it meets a tensor of the job, a gradient or the
state of an optimizer, the trace has a twin of it there (`tracing.RealTensors`). An optimizer's
``step`` is made by a shadow of the optimizer, with traced floats for its hyperparameters, into the
same trace; the user's own objects keep their tensors, and their attributes are watched as in every
trace.

Gradients outlive such a step, and the next one may read them, test them for None, or add to them.
So those that are there between two steps are tensors of the job like its buffers, which the graph
reads and writes. Which parameters have one has to be the same before and after the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from waterflow.capture.forward import ForwardTrace, check_trace
from waterflow.capture.optimizer import Attempt, OptimizerTrace, Scalars, check_groups, live_trace
from waterflow.capture.recording import Recorder
from waterflow.capture.shadow import changed_attribute, shadow_optimizer
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import (
    RealTensors,
    StateMovedError,
    capture_error,
    fake_twin,
    reason_of,
    trace,
    users_line,
)
from waterflow.common.errors import CaptureError
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    Layout,
    NotCapturableError,
    StateLayout,
    hyperparameters,
    state_layout,
    trained_parameters,
)
from waterflow.job.outcome import Outcome, StepTensors
from waterflow.job.several import optimizers_in
from waterflow.partitioner.graph.step_graph import Input

_ABSENT = object()
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
#: What each class's ``step`` calls of its optimizer before it does anything.
_HOOKS = "_optimizer_step_pre_hooks"


class UnsettledError(CaptureError):
    """The step makes state or gradients that were not there before it, as first steps do: the next
    one may be captured. Users see a `CaptureError`.

    Attributes:
        state: layouts of the optimizer's state that the next step finds.
        gradients: layouts of the gradients that it finds.
    """

    state: StateLayout
    gradients: Mapping[Input, Layout]


def trace_own_step(
    job: Job,
    batch: FlatBatch,
    tensors: Mapping[Input, torch.Tensor],
    watch: TraceWatch,
    state: StateLayout | None = None,
) -> tuple[ForwardTrace, OptimizerTrace]:
    """Traces one step of a job that has a step of its own; nothing is executed.

    Args:
        job: the job.
        batch: a batch, taken apart.
        tensors: what the job holds between steps, gradients included.
        watch: what the trace runs in.
        state: layouts of the optimizer's state among these; None: as it is.

    Returns:
        The whole step as a forward trace (`ForwardTrace.is_whole`), and what of it is live.

    Raises:
        UnsettledError: the next step may be captured.
        CaptureError: the step cannot be captured exactly.
    """
    parameters = trained_parameters(job.optimizer)
    if len(set(map(id, parameters))) < len(parameters):
        reason = "several of its optimizers train the same parameter"
        raise capture_error(job.name, reason, users_line(None, job.function))
    attempts: list[_OwnStep] = []
    found = state_layout(job.optimizer) if state is None else state

    def attempt(fixed: set[Any], seed: int) -> Attempt:
        attempts.append(_OwnStep(job, batch, tensors, found, fixed, seed))
        return attempts[-1].run(watch)

    try:
        live = live_trace(attempt, hyperparameters(job.optimizer))
    except NotCapturableError as error:
        where = users_line(error.__cause__, job.function)
        raise capture_error(job.name, f"an optimizer's step cannot be: {error}", where) from error
    traced = next(one for one in attempts if one.recording is live.recording)
    check_trace(job, watch, traced.forward, traced.foreign)
    return traced.forward, live


class _OwnTensors(RealTensors):
    """``.data`` is the tensor without its history."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA:
            func = torch.Tensor.detach
        return super().__torch_function__(func, types, args, kwargs)


class _OwnStep(Attempt):
    """One trace of the step with one set of odd values.

    Attributes:
        forward: the step as a forward trace.
        foreign: tensors that get a gradient, or have one, and are none of the job's.
    """

    forward: ForwardTrace

    def __init__(
        self,
        job: Job,
        batch: FlatBatch,
        tensors: Mapping[Input, torch.Tensor],
        state: StateLayout,
        fixed: set[Any],
        seed: int,
    ) -> None:
        super().__init__(job, (), state, fixed, seed)
        self.batch = batch
        self.tensors = tensors
        self.twins: dict[Input, torch.Tensor] = {}
        self.foreign: list[torch.Tensor] = []
        self.changes_batch = False
        self.shadows: list[torch.optim.Optimizer] = []
        self.updates: list[range] = []  # places of nodes that optimizers have made
        self.metrics: tuple[str, ...] = ()

    def run(self, watch: TraceWatch) -> _OwnStep:
        """Traces the step.

        Raises:
            CaptureError, NotCapturableError: it cannot be captured exactly.
        """
        job = self.job
        try:
            self.code = watch.assumptions.account.codes
            watch.run(self._trace)
        except (CaptureError, NotCapturableError):
            raise
        except Exception as error:
            where = users_line(error, job.function)
            raise capture_error(job.name, reason_of(error), where) from error
        if moved := watch.problem():
            raise capture_error(job.name, moved, users_line(None, job.function), StateMovedError)
        return self

    @property
    def updating(self) -> set[fx.Node]:
        """The nodes that optimizers have made."""
        nodes = list(self.recording.graph.nodes)
        return {nodes[place] for places in self.updates for place in places}

    @property
    def created(self) -> dict[tuple[int, Any], fx.Node]:
        """State that it creates: none, or it would not have been traced."""
        return {}

    def _trace(self) -> None:
        mode, job = CaptureMode(), self.job
        self.twins = {meaning: fake_twin(mode, t) for meaning, t in self.tensors.items()}
        for meaning, leaf in self._leaves():
            leaf.grad = self.twins.get(Input("gradient", meaning.key))
        batch = [fake_twin(mode, tensor, job.device) for tensor in self.batch.tensors]
        fakes, reals = [*self.twins.values(), *batch], list(self.tensors.values())
        self.recording = trace(
            *(self._step, mode, fakes, reals, _OwnTensors),
            notes_modes=True,
            code=self.code,
            batch=self.batch.tensors,
        )
        inputs = [*self.twins, *(Input("batch", index) for index in range(len(batch)))]
        self.forward = ForwardTrace(
            *(self.recording, inputs, self.recording.outputs[0], [], self.recorder.size, []),
            metrics=self.metrics,
            is_whole=True,
            changes_batch=self.changes_batch,
        )

    def _leaves(self) -> Iterator[tuple[Input, torch.Tensor]]:
        """The twins that may have gradients."""
        return ((m, twin) for m, twin in self.twins.items() if m.kind == "parameter")

    def _step(self, recorder: Recorder, tensors: Any) -> list[torch.Tensor]:
        self.recorder = recorder
        number_of = {id(real): meaning for meaning, real in self.tensors.items()}
        parameters = [self.twins[number_of[id(real)]] for real in self.real]
        state = {("state", *m.key): t for m, t in self.twins.items() if m.kind == "state"}  # type: ignore[misc]
        groups = self._traced_groups(parameters, {})
        self._make_shadows(groups, self._state_for(parameters, state))
        count = len(self.batch.tensors)
        given = list(tensors[len(tensors) - count :])
        batch = self.batch.rebuild(given)
        before = self.batch.contents(batch, given)
        with self._shadows_step():
            returned = self.job.step(batch)  # type: ignore[misc]
        self.changes_batch = self.batch.contents(batch, given) != before
        loss = self._told(returned)
        self._check_optimizers(groups)
        held = {p: entries for shadow in self.shadows for p, entries in shadow.state.items()}
        self._new_state(parameters, held, state)
        if self.outputs:
            raise self._unsettled("the step makes state of an optimizer")
        self._keep_gradients()
        self.foreign = recorder.given_gradients()
        return [loss]

    def _told(self, returned: Any) -> torch.Tensor:
        """The loss, with the metrics behind it, as the graph tells it."""
        outcome = Outcome.of(self.job.name, returned, "step")
        loss = outcome.loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            raise self._refusal(f"the step returns {loss!r}, and a graph tells tensors (return it)")
        told = StepTensors(loss.detach(), [outcome.detached_metrics()])
        self.metrics = tuple(told.names)
        return told.readings() if self.metrics else told.loss

    def _refusal(self, reason: str) -> CaptureError:
        return capture_error(self.job.name, reason, users_line(None, self.job.function))

    def _unsettled(self, reason: str) -> UnsettledError:
        where = users_line(None, self.job.function)
        error = capture_error(self.job.name, reason, where, UnsettledError)
        error.state = self.state_after
        error.gradients = {
            Input("gradient", meaning.key): Layout.of(leaf.grad)
            for meaning, leaf in self._leaves()
            if leaf.grad is not None
        }
        return error

    # Optimizers

    def _make_shadows(self, groups: list[dict[str, Any]], state: defaultdict[Any, Any]) -> None:
        for member, own in self._members(groups):
            held = {id(parameter) for group in own for parameter in group["params"]}
            of_own: defaultdict[Any, Any] = defaultdict(dict)
            of_own.update({p: entries for p, entries in state.items() if id(p) in held})
            self.shadows.append(shadow_optimizer(member, [dict(group) for group in own], of_own))

    def _members(
        self, groups: list[dict[str, Any]]
    ) -> Iterator[tuple[torch.optim.Optimizer, list[dict[str, Any]]]]:
        """Each optimizer with its own of the groups of all."""
        start = 0
        for member in optimizers_in(self.job.optimizer):
            stop = start + len(member.param_groups)
            yield member, groups[start:stop]
            start = stop

    @contextlib.contextmanager
    def _shadows_step(self) -> Iterator[None]:
        """Inside, the ``step`` of each of the job's optimizers is made by its shadow."""
        with contextlib.ExitStack() as stack:
            for member, shadow in zip(optimizers_in(self.job.optimizer), self.shadows, strict=True):
                stack.enter_context(_state_kept(member))
                update = functools.partial(self._update, shadow)
                stack.enter_context(_in_place_of(vars(member), "step", update))
                refusing = OrderedDict({0: self._refuse_bypass})
                stack.enter_context(_in_place_of(vars(member), _HOOKS, refusing))
            yield

    def _update(self, shadow: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            name = type(shadow).__name__
            self._refuse(f"{name} evaluates the loss by itself, as often as it likes")
        start = self.recorder.size
        try:
            with torch.no_grad(), Scalars(self._read):
                shadow.step()
        except Exception as error:
            self.recorder.note(error)
            raise
        self.updates.append(range(start, self.recorder.size))

    def _refuse_bypass(self, *_: Any) -> None:
        self._refuse("its class's step is called, and not the optimizer's own")

    def _refuse(self, reason: str) -> NoReturn:
        """Ends the trace, whether the step catches that or not."""
        error = NotCapturableError(reason)
        self.recorder.note(error)
        raise error

    def _check_optimizers(self, groups: list[dict[str, Any]]) -> None:
        for shadow, (member, own) in zip(self.shadows, self._members(groups), strict=True):
            check_groups(own, shadow.param_groups)
            changed = changed_attribute(shadow, member)
            if changed is not None:
                raise NotCapturableError(
                    f"the step changes the optimizer's attribute {changed!r}, and a captured step "
                    "would not"
                )

    # Gradients

    def _keep_gradients(self) -> None:
        """What the step leaves as gradients goes into the tensors that were there before."""
        left: list[tuple[torch.Tensor, torch.Tensor]] = []
        for meaning, leaf in self._leaves():
            before, after = self.twins.get(Input("gradient", meaning.key)), leaf.grad
            if (before is None) != (after is None):
                reason = "the step leaves gradients where there were none, or none where some were"
                raise self._unsettled(reason)
            if leaf.requires_grad != self.tensors[meaning].requires_grad:
                raise self._refusal("the step changes which parameters require gradients")
            if before is None or after is None or after is before:
                continue
            if Layout.of(before) != Layout.of(after):
                raise self._refusal("the step leaves a gradient of another layout than there was")
            left.append((before, after))
        written = {before.untyped_storage()._cdata for before, _ in left}
        with torch.no_grad():
            # What lies in one of them is another's by now: it is read before any is written.
            read = [
                after.clone() if after.untyped_storage()._cdata in written else after
                for _, after in left
            ]
            for (before, _), after in zip(left, read, strict=True):
                before.copy_(after)


@contextlib.contextmanager
def _in_place_of(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    former = attributes.get(name, _ABSENT)
    attributes[name] = value
    try:
        yield
    finally:
        if former is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = former


@contextlib.contextmanager
def _state_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts back what the traced code does to the optimizer's state by itself.

    Raises:
        NotCapturableError: it did.
    """
    state = optimizer.state
    before = {parameter: dict(entries) for parameter, entries in state.items()}
    entries_of = dict(state)
    try:
        yield
    finally:
        is_kept = state.keys() == before.keys() and all(
            state[p] is entries_of[p] and _are_same(state[p], before[p]) for p in before
        )
        if not is_kept:
            state.clear()
            state.update(entries_of)
            for parameter, entries in before.items():
                state[parameter].clear()
                state[parameter].update(entries)
    if not is_kept:
        raise NotCapturableError("its state is changed by the step itself")


def _are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
