"""Steps that are known to be opaque before anything is traced, and why."""

from __future__ import annotations

import sys
from typing import Any

import torch

from waterflow.capture.callbacks import looks_at_gradients
from waterflow.capture.caller import CallerContext
from waterflow.capture.torchs_calls import clips_by_others, has_own_zero_grad
from waterflow.capture.tracing import users_line
from waterflow.job.job import Job
from waterflow.job.training_step import needs_closure

#: Why steps stay eager Python that run what ``torch.compile`` makes: other kernels, for other bits.
COMPILED = (
    "the step runs what torch.compile has made of it, which need not have the numbers of the "
    "operators it was made of (leave torch.compile out, and it may be captured)"
)


def why_opaque(job: Job, caller: CallerContext) -> str | None:
    """Why the job's steps run as eager Python from the start; None where they may be captured."""
    optimizer = job.optimizer
    name = type(optimizer).__name__
    if caller.opaque is not None:
        return caller.opaque
    if needs_closure(optimizer):
        where = users_line(None, type(optimizer).step)
        return f"{name} evaluates the loss by itself, as often as it likes ({where})"
    if job.step is None and has_own_zero_grad(optimizer):
        where = users_line(None, optimizer.zero_grad)
        return f"{name} has a zero_grad of its own, so gradients may outlive a step ({where})"
    if clips_by_others(job):
        return "its gradients are clipped by functions that are not torch's own"
    if any(map(_is_compiled, job.root.modules())):
        return COMPILED
    if job.keep_grads:
        return "callbacks are to see gradients (keep_grads=True)"
    # Found by names, so perhaps wrongly: no reason to refuse a job that insists on capture.
    if job.capture == "auto" and looks_at_gradients(job):
        where = users_line(None, job.on_step or getattr(job.scheduler, "step", None))
        return f"a callback may look at gradients, or step another optimizer ({where})"
    return None


def _is_compiled(module: torch.nn.Module) -> bool:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled before
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return frames is not None and isinstance(module, frames.OptimizedModule)
