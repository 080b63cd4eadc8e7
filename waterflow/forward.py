"""Captures the forward and backward pass of a step: model and loss in, loss and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import stateless

from waterflow.batch import FlatBatch
from waterflow.job import Job
from waterflow.partitioner.graph import Input, tensors_of
from waterflow.tracing import (
    TRACE_LOCK,
    StateWatch,
    capture_error,
    fake_mode,
    nodes_so_far,
    trace,
    users_line,
)


@dataclass
class ForwardTrace:
    """A traced forward and backward pass.

    Attributes:
        module: the graph; placeholders in the order parameters, buffers, batch tensors.
        inputs: what each placeholder stands for.
        loss: the node of the loss.
        gradients: a node per parameter, None where it gets no gradient.
        backward_start: number of nodes before the backward pass.
    """

    module: fx.GraphModule
    inputs: list[Input]
    loss: fx.Node
    gradients: list[fx.Node | None]
    backward_start: int


def named_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """A model's parameters and buffers by name, each tensor once."""
    return dict(model.named_parameters()), dict(model.named_buffers())


def fake_twin(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake leaf of the same layout that calls the same gradient hooks."""
    twin = mode.from_tensor(tensor, static_shapes=True)
    for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
        twin.register_hook(hook)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)
    return twin


class _Step:
    """The function that is traced; remembers what the graph alone does not tell."""

    def __init__(self, job: Job, batch: FlatBatch) -> None:
        self.job = job
        self.batch = batch
        self.parameters, self.buffers = named_tensors(job.model)
        self.backward_start = 0
        self.has_gradient: list[bool] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        n, m = len(self.parameters), len(self.buffers)
        parameters, buffers, batch = tensors[:n], tensors[n : n + m], tensors[n + m :]
        swapped = dict(zip(self.parameters, parameters, strict=True))
        swapped.update(zip(self.buffers, buffers, strict=True))
        with stateless._reparametrize_module(self.job.model, swapped, tie_weights=True):
            loss = self.job.loss(self.job.model, self.batch.rebuild(batch))
            self._check(loss)
            self.backward_start = nodes_so_far()
            loss.backward()
            self._keep_reassigned_buffers(dict(zip(self.buffers, buffers, strict=True)))
        gradients = [p.grad for p in parameters]
        self.has_gradient = [g is not None for g in gradients]
        return [loss, *(g for g in gradients if g is not None)]

    def _check(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else repr(loss)
            raise TypeError(f"the loss must be a tensor with one element, got {what}")
        if not loss.requires_grad:
            raise TypeError(
                "the loss does not depend on any parameter that requires a gradient, nothing to train"
            )

    def _keep_reassigned_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        """``self.mean = new`` on a buffer becomes a copy into it: the graph's input stays the buffer."""
        for name, given in buffers.items():
            owner, _, attribute = name.rpartition(".")
            current = self.job.model.get_submodule(owner)._buffers.get(attribute)
            if current is not None and current is not given:
                with torch.no_grad():
                    given.copy_(current)


def trace_forward(job: Job, batch: FlatBatch) -> ForwardTrace:
    """Traces one step of the job on a batch of this signature; nothing is executed.

    Raises:
        CaptureError: the step depends on values, on Python state, or on tensors that the graph
            cannot have as inputs.
    """
    step, mode, watch = _Step(job, batch), fake_mode(), StateWatch(job.model)
    real = [*step.parameters.values(), *step.buffers.values(), *batch.tensors]
    gradients_before = {id(p): p.grad for p in _trained(job)}
    twins: list[torch.Tensor] = [fake_twin(mode, tensor) for tensor in real]
    try:
        with TRACE_LOCK, watch.torch_generator(), torch.enable_grad():
            module = trace(step, mode, twins)
    except Exception as error:
        watch.problem()
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise capture_error(job.name, reason, users_line(error, job.loss)) from error
    finally:
        leaked = _restore_gradients(job, gradients_before)
    problem = watch.problem() or leaked
    if problem:
        raise capture_error(job.name, problem, users_line(None, job.loss))
    result = _result(step, module)
    _check_random(job, watch, result)
    _check_batch_unchanged(job, result)
    return result


def _trained(job: Job) -> list[torch.Tensor]:
    return [p for group in job.optimizer.param_groups for p in group["params"]]


def _restore_gradients(job: Job, before: dict[int, torch.Tensor | None]) -> str | None:
    """A gradient that arrived at a real parameter went around the captured model."""
    problem = None
    for parameter in _trained(job):
        if parameter.grad is not before[id(parameter)]:
            parameter.grad = before[id(parameter)]
            problem = (
                f"the loss uses a trained parameter of shape {tuple(parameter.shape)} that is not "
                "reached through the model given to it (use the `model` argument, and register the "
                "parameter in the model)"
            )
    return problem


def _result(step: _Step, module: fx.GraphModule) -> ForwardTrace:
    inputs = [Input("parameter", name) for name in step.parameters]
    inputs += [Input("buffer", name) for name in step.buffers]
    inputs += [Input("batch", index) for index in range(len(step.batch.tensors))]
    output = next(node for node in module.graph.nodes if node.op == "output")
    loss, *nodes = output.args[0]
    remaining = iter(nodes)
    gradients = [next(remaining) if has else None for has in step.has_gradient]
    return ForwardTrace(module, inputs, loss, gradients, step.backward_start)


def seeded(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    tags: Callable[..., Any] = getattr(node.target, "tags", ())  # type: ignore[assignment]
    return torch.Tag.nondeterministic_seeded in tags  # type: ignore[operator]


def writes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        fx.map_arg(value, written.append)
    return written


def storage_ids(node: fx.Node) -> set[int]:
    """Identities of the (fake) storages behind a node's value."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node)}


def mutated_placeholders(module: fx.GraphModule) -> set[int]:
    """Numbers of the placeholders whose storage some node writes to."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    owner = {sid: i for i, node in enumerate(placeholders) for sid in storage_ids(node)}
    found: set[int] = set()
    for node in module.graph.nodes:
        for target in writes(node):
            found |= {owner[sid] for sid in storage_ids(target) if sid in owner}
    return found


def _check_random(job: Job, watch: StateWatch, result: ForwardTrace) -> None:
    draws = any(seeded(node) for node in result.module.graph.nodes)
    if draws and watch.torch_generator_touched:
        reason = (
            "the step sets or saves torch's random state and draws random numbers (activation "
            "checkpointing with dropout does), which a captured step cannot replay"
        )
        raise capture_error(job.name, reason, users_line(None, job.loss))


def _check_batch_unchanged(job: Job, result: ForwardTrace) -> None:
    for index in mutated_placeholders(result.module):
        if result.inputs[index].kind == "batch":
            reason = "the step changes its batch in place (clone the tensor before changing it)"
            raise capture_error(job.name, reason, users_line(None, job.loss))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
