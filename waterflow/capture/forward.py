"""Captures the forward and backward pass of a step: model and loss in, loss and gradients out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from waterflow.capture.data_tensors import hands_out_anew
from waterflow.capture.recording import Recorder, Recording
from waterflow.capture.shadow import Shadow, UnkeptChangeError
from waterflow.capture.side_effects import TraceWatch
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import (
    StateMovedError,
    capture_error,
    fake_twin,
    reason_of,
    trace,
    users_line,
)
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.training_step import compute_gradients
from waterflow.partitioner.graph.effects import seeded, storage_ids, written_storages
from waterflow.partitioner.graph.step_graph import Input


@dataclass
class ForwardTrace:
    """A traced forward and backward pass.

    Attributes:
        recording: its placeholders are in the order parameters, buffers, batch tensors.
        inputs: what each placeholder stands for.
        loss: the node of the loss, and of the metrics behind it.
        gradients: a node per parameter, None where it gets no gradient.
        backward_start: number of nodes before the backward pass.
        metrics: the names of these.
        reassigned: buffers that the step gives new tensors; the graph writes into the old ones.
        stand_ins: by the identities of tensors in the graph, those that another job has instead.
        is_whole: whether the updates are in it, too, as in a step of the user's own.
        changes_batch: whether it changes a container of its batch, which the graph does not.
    """

    recording: Recording
    inputs: list[Input]
    loss: fx.Node
    gradients: list[fx.Node | None]
    backward_start: int
    reassigned: list[str]
    metrics: tuple[str, ...] = ()
    stand_ins: Mapping[int, torch.Tensor] = field(default_factory=dict)
    is_whole: bool = False
    changes_batch: bool = False


def named_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """A model's parameters and buffers by name, each tensor once."""
    return dict(model.named_parameters()), dict(model.named_buffers())


class _Step:
    """The function that is traced; remembers what the graph alone does not tell."""

    def __init__(self, job: Job, batch: FlatBatch) -> None:
        self.job = job
        self.batch = batch
        self.parameters, self.buffers = named_tensors(job.root)
        self.own = [*self.parameters.values(), *self.buffers.values()]
        self.backward_start: int | None = None
        self.metrics: tuple[str, ...] = ()
        self.foreign: list[torch.Tensor] = []  # not of the model, with gradients
        self.has_gradient: list[bool] = []
        self.reassigned: list[str] = []
        self.changes_batch = False

    def __call__(self, recorder: Recorder, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        n, m = len(self.parameters), len(self.buffers)
        parameters, buffers, batch = tensors[:n], tensors[n : n + m], tensors[n + m :]
        twins = {id(own): twin for own, twin in zip(self.own, tensors, strict=False)}
        shadow = Shadow(self.job.root, twins)

        def before_backward(loss: Any) -> None:
            if self.backward_start is None:
                self.backward_start = recorder.size

        twin = self.batch.rebuild(batch)
        before = self.batch.contents(twin, batch)
        told = compute_gradients(self.job, self.job.model_in(shadow.model), twin, before_backward)
        self.changes_batch = self.batch.contents(twin, batch) != before
        self.metrics = tuple(told.names)
        loss = told.readings() if self.metrics else told.loss
        shadow.check()
        self.foreign = recorder.given_gradients()
        named = dict(zip(self.buffers, buffers, strict=True))
        self.reassigned = _keep_reassigned_buffers(shadow.model, named)
        gradients = [p.grad for p in parameters]
        self.has_gradient = [g is not None for g in gradients]
        return [loss, *(g for g in gradients if g is not None)]


def _keep_reassigned_buffers(model: nn.Module, buffers: dict[str, torch.Tensor]) -> list[str]:
    """``self.mean = new`` becomes a copy into the buffer: the graph's input stays the same.

    Returns the names of these buffers.
    """
    found: list[str] = []
    for name, given in buffers.items():
        owner, _, attribute = name.rpartition(".")
        current = model.get_submodule(owner)._buffers.get(attribute)
        if current is not None and current is not given:
            found.append(name)
            with torch.no_grad():
                given.copy_(current)
    return found


def trace_forward(job: Job, batch: FlatBatch, watch: TraceWatch | None = None) -> ForwardTrace:
    """Traces one step of the job on a batch of this signature; nothing is executed.

    The graph takes the batch on the model's device, wherever it is now.

    Args:
        job: the job.
        batch: a batch, taken apart.
        watch: what the trace runs in, where other traces run in it, too.

    Raises:
        CaptureError: the step depends on values, on Python state, or on tensors that the graph
            cannot have as inputs.
    """
    if watch is None:
        with TraceWatch(job) as watch:
            return trace_forward(job, batch, watch)
    step = _Step(job, batch)
    try:
        recording = watch.run(lambda: _trace(step, watch.assumptions.account.codes))
    except UnkeptChangeError as error:
        raise capture_error(job.name, str(error), users_line(None, job.function)) from error
    except Exception as error:
        raise capture_error(job.name, reason_of(error), users_line(error, job.function)) from error
    if moved := watch.problem():
        raise capture_error(job.name, moved, users_line(None, job.function), StateMovedError)
    result = _result(step, recording)
    check_trace(job, watch, result, step.foreign)
    return result


def check_trace(
    job: Job, watch: TraceWatch, result: ForwardTrace, foreign: Sequence[torch.Tensor]
) -> None:
    """Whether a graph of the trace would do all that the step does.

    Args:
        job: whose step it is.
        watch: what it was traced in.
        result: the trace.
        foreign: tensors that are none of the job's, and were given a gradient.

    Raises:
        CaptureError: it would not.
    """
    if problem := _foreign_gradient(job, foreign):
        raise capture_error(job.name, problem, users_line(None, job.function))
    _check_random(job, watch, result)
    _check_batch_unchanged(job, result)


def _trace(step: _Step, code: Collection[CodeType]) -> Recording:
    mode = CaptureMode()
    fakes: list[torch.Tensor] = [fake_twin(mode, tensor) for tensor in step.own]
    fakes += [fake_twin(mode, tensor, step.job.device) for tensor in step.batch.tensors]
    return trace(step, mode, fakes, step.own, code=code, batch=step.batch.tensors)


def _foreign_gradient(job: Job, foreign: Sequence[torch.Tensor]) -> str | None:
    """A tensor that gets a gradient, but not as a parameter of the model, would get none."""
    trained = {id(parameter) for parameter in trained_parameters(job.optimizer)}
    for tensor in foreign:
        what = "trained parameter" if id(tensor) in trained else "tensor that needs a gradient"
        if job.step is not None:
            return (
                f"the step leaves a gradient at a {what} of shape {tuple(tensor.shape)} that is "
                "none of the job's (name its module in model= or modules=, or detach it)"
            )
        return (
            f"the loss uses a {what} of shape {tuple(tensor.shape)} that is not reached "
            "through the model given to it (use the `model` argument, and register the "
            "parameter in the model; name its module in modules=; or detach it)"
        )
    return None


def _result(step: _Step, recording: Recording) -> ForwardTrace:
    inputs = [Input("parameter", name) for name in step.parameters]
    inputs += [Input("buffer", name) for name in step.buffers]
    inputs += [Input("batch", index) for index in range(len(step.batch.tensors))]
    loss, *nodes = recording.outputs
    remaining = iter(nodes)
    gradients = [next(remaining) if has else None for has in step.has_gradient]
    return ForwardTrace(
        recording,
        inputs,
        loss,
        gradients,
        step.backward_start or 0,
        step.reassigned,
        step.metrics,
        changes_batch=step.changes_batch,
    )


def mutated_by(recording: Recording) -> frozenset[fx.Node]:
    """The placeholders and constants whose storage some node writes to."""
    if recording.mutated is None:
        nodes = recording.graph.nodes
        written = written_storages(nodes)
        sources = [node for node in nodes if node.op in ("placeholder", "get_attr")]
        found = (node for node in sources if not written.isdisjoint(storage_ids(node)))
        recording.mutated = frozenset(found)
    return recording.mutated


def _check_random(job: Job, watch: TraceWatch, result: ForwardTrace) -> None:
    if watch.touched_streams and any(seeded(node) for node in result.recording.graph.nodes):
        reason = (
            "the step sets or saves torch's random state and draws random numbers (activation "
            "checkpointing with dropout does), which a captured step cannot replay"
        )
        raise capture_error(job.name, reason, users_line(None, job.function))


def _check_batch_unchanged(job: Job, result: ForwardTrace) -> None:
    """A graph changes neither a batch's containers, which the data may hand out again, nor its
    tensors."""
    if result.changes_batch and not hands_out_anew(job.data):
        reason = (
            "the step changes its batch, which the data may yield again (change a copy: "
            "dict(batch), list(batch))"
        )
        raise capture_error(job.name, reason, users_line(None, job.function))
    placeholders = [node for node in result.recording.graph.nodes if node.op == "placeholder"]
    mutated = mutated_by(result.recording)
    for meaning, node in zip(result.inputs, placeholders, strict=True):
        if meaning.kind == "batch" and node in mutated:
            reason = "the step changes its batch in place (clone the tensor before changing it)"
            raise capture_error(job.name, reason, users_line(None, job.function))
