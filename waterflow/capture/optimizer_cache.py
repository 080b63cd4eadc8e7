"""Traces of optimizers' steps, made once for all jobs and batches that they fit.

Tracing the optimizer takes most of a capture. The trace depends on the optimizer and on the layouts
of its parameters, gradients and state, but not on the batch, the model, or hyperparameters that
stay live: trials that differ in their learning rates share it. Of torch's own optimizers it does
not depend on shapes either (`any_shapes`): so do trials that differ in their widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from waterflow.account.trust import is_trusted_class
from waterflow.capture.any_shapes import AnyShapes, SizesMatterError
from waterflow.capture.fingerprint import Fingerprint
from waterflow.capture.forward import ForwardTrace
from waterflow.capture.join import gradient_layouts
from waterflow.capture.optimizer import OptimizerTrace, trace_optimizer
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.torchs_calls import has_own_step
from waterflow.capture.traced_floats import traceable
from waterflow.job.job import Job
from waterflow.job.optimizer_state import (
    Layout,
    StateLayout,
    hyperparameters,
    numbers_of,
    state_layout,
)
from waterflow.job.training_step import clip_order
from waterflow.partitioner.graph.effects import only_copied

#: So many are kept, the latest: a trace may take megabytes.
_KEPT = 8


@dataclass
class OptimizerTraces:
    """The latest traces, for all who capture jobs together."""

    _kept: list[tuple[str, OptimizerTrace]] = field(default_factory=list)  # the latest last
    _of_sizes: set[str] = field(default_factory=set)  # keys of steps to which sizes matter

    def of(
        self, job: Job, forward: ForwardTrace, watch: TraceWatch | None = None
    ) -> tuple[OptimizerTrace | None, OptimizerTrace]:
        """The first step's trace (None where the state exists) and the steady one.

        Args:
            job: whose optimizer it is.
            forward: its forward and backward pass.
            watch: what the traces run in, where others run in it, too.

        Raises:
            NotCapturableError: the optimizer runs eagerly.
        """
        if watch is None:
            with TraceWatch(job) as watch:
                return self.of(job, forward, watch)
        gradients = gradient_layouts(job, forward)
        first = self._one(job, gradients, state_layout(job.optimizer), watch)
        if not first.outputs:
            return None, first
        return first, self._one(job, gradients, first.state_after, watch)

    def _one(
        self, job: Job, gradients: list[Layout | None], state: StateLayout, watch: TraceWatch
    ) -> OptimizerTrace:
        any_shapes = AnyShapes.of(job, gradients, state)
        if any_shapes is not None:
            shared = self._for_any_shapes(job, any_shapes, watch)
            if shared is not None:
                return shared
        key = _key(job, gradients, state)
        if key is None:
            return trace_optimizer(job, gradients, state, watch)
        found = self._known(key, job)
        if found is None:
            found = trace_optimizer(job, gradients, state, watch)
            self._keep(key, found)
        return found

    def _for_any_shapes(
        self, job: Job, any_shapes: AnyShapes, watch: TraceWatch
    ) -> OptimizerTrace | None:
        """The trace with stand-ins, applied to the job's own parameters; None where sizes matter
        to it."""
        key = _key(job, any_shapes.gradients, any_shapes.state, any_shapes.parameters)
        if key is None or key in self._of_sizes:
            return None
        trace = self._known(key, job)
        if trace is None:
            parameters = any_shapes.parameters
            trace = trace_optimizer(job, any_shapes.gradients, any_shapes.state, watch, parameters)
            self._keep(key, trace)
        try:
            return any_shapes.applied(trace)
        except SizesMatterError:
            self._of_sizes.add(key)
            return None

    def _known(self, key: str, job: Job) -> OptimizerTrace | None:
        values = hyperparameters(job.optimizer)
        for entry in self._kept:
            if entry[0] == key and entry[1].valid_for(values):
                self._kept.remove(entry)
                self._kept.append(entry)
                return entry[1]
        return None

    def _keep(self, key: str, trace: OptimizerTrace) -> None:
        if _is_shareable(trace):
            self._kept.append((key, trace))
            del self._kept[:-_KEPT]


def _key(
    job: Job,
    gradients: list[Layout | None],
    state: StateLayout,
    parameters: Sequence[Layout] | None = None,
) -> str | None:
    """Equal for steps that do the same, live numbers aside; None where that is not known.

    Args:
        job: whose optimizer it is.
        gradients, state: what its step has.
        parameters: what stands for its parameters, if something does.
    """
    own = job.optimizer
    attributes = dict(vars(own))
    if all(map(is_trusted_class, type(own).__mro__)):  # others may compute with them
        attributes["defaults"] = _without_numbers(own.defaults)
    attributes["param_groups"] = [_without_numbers(group) for group in own.param_groups]
    if parameters is not None:
        attributes["param_groups"] = _with_stand_ins(attributes["param_groups"], parameters)
    attributes["state"] = state
    attributes.pop("_opt_called", None)  # a note for schedulers, as is their wrapper of step()
    if not has_own_step(own):
        attributes.pop("step", None)
    clipping = tuple(job.rules[:2]), tuple(clip_order(job))
    fingerprint = Fingerprint()
    try:
        fingerprint.add("optimizer", (type(own), attributes, clipping, gradients))
    except Exception:  # objects may refuse to be looked at in any way
        return None
    return None if fingerprint.doubts else fingerprint.digest()


def _without_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that a trace keeps live, or checks before each step."""
    return {
        key: "number" if traceable(value) else len(value) if numbers_of(value) else value
        for key, value in group.items()
    }


def _with_stand_ins(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Layout]
) -> list[dict[str, Any]]:
    """Groups with layouts, and whether a gradient is asked for, in place of the parameters."""
    layouts = iter(parameters)
    return [
        {**group, "params": [(next(layouts), p.requires_grad) for p in group["params"]]}
        for group in groups
    ]


def _is_shareable(trace: OptimizerTrace) -> bool:
    """Whether nothing in it is a job's own, as a tensor that the optimizer keeps would be."""
    recording = trace.recording
    constants = [node for node in recording.graph.nodes if node.op == "get_attr"]
    return all(
        isinstance(tensor := recording.constant_of(node), FakeTensor)
        or (only_copied(node) and tensor.numel() == 1)
        for node in constants
    )
