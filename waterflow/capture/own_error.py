"""What the user's own Python says of a batch on which a captured step, or its capture, has failed.

A graph knows no lines, and descriptions of operators have words of their own: "a and b must have
same reduction dim" for what a kernel calls "shapes cannot be multiplied". So before a job ends with
such an error its forward and backward pass is made once more as the plain loop would, on copies of
its tensors, watched and undone as a trace is. What that raises is the user's bug, with the line.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from waterflow.capture.caller import CallerContext
from waterflow.capture.forward import named_tensors
from waterflow.capture.shadow import Shadow
from waterflow.capture.side_effects import TraceWatch
from waterflow.executor.run.rng import JobRng
from waterflow.job.batch import FlatBatch
from waterflow.job.job import Job
from waterflow.job.training_step import compute_gradients


def own_error(
    job: Job, flat: FlatBatch, rng: JobRng | None = None, caller: CallerContext | None = None
) -> Exception | None:
    """What the job's own Python raises for this batch; None where it raises nothing.

    Takes the memory of the model and one step's activations, beside any budget. Nothing of the job
    is changed but what a trace would change, too.

    Args:
        job: the job.
        flat: the batch, taken apart.
        rng: the job's random streams; copies are drawn from.
        caller: the context of the job's Python; the calling thread's if None.
    """
    parameters, buffers = named_tensors(job.root)
    own = [*parameters.values(), *buffers.values()]
    if any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in own):
        return None  # a job without memory has no values to fail on
    try:
        with TraceWatch(job, rng, caller) as watch:
            watch.run(functools.partial(_forward_and_backward, job, flat, own))
    except Exception as error:
        return error
    return None


def _forward_and_backward(job: Job, flat: FlatBatch, own: list[torch.Tensor]) -> None:
    twins = {id(tensor): copied(tensor) for tensor in own}
    shadow = Shadow(job.root, twins)
    batch = flat.rebuild([tensor.detach().to(job.device, copy=True) for tensor in flat.tensors])
    with torch.autograd.set_multithreading_enabled(False), InPlaceOf(twins):
        compute_gradients(job, job.model_in(shadow.model), batch)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same values that calls the same gradient hooks."""
    values = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
        values.register_hook(hook)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        values.register_post_accumulate_grad_hook(hook)
    return values


class InPlaceOf(TorchFunctionMode):
    """The job's tensors that its code reaches by another way than the model stand for the copies,
    too: nothing computes with the real ones."""

    def __init__(self, twins: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: self._twins.get(id(tensor), tensor), (args, kwargs or {})
        )
        return func(*args, **kwargs)
