"""Steps that are known to be opaque before anything is traced, and why."""

from __future__ import annotations

import sys
from typing import Any

import torch

from waterflow.account.account import Account
from waterflow.account.trust import Packages, is_of_trusted_classes, is_trusted_code
from waterflow.capture.callbacks import callbacks_use_gradients, data_use_gradients
from waterflow.capture.caller import CallerContext
from waterflow.capture.data_tensors import LIMITS
from waterflow.capture.gradient_use import names_gradients
from waterflow.capture.torchs_calls import (
    clips_by_others,
    has_hooks,
    has_own_step,
    has_own_zero_grad,
)
from waterflow.capture.tracing import users_line
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.training_step import needs_closure

#: Why steps stay eager Python that run what ``torch.compile`` makes: other kernels, for other bits.
COMPILED = (
    "the step runs what torch.compile has made of it, which need not have the numbers of the "
    "operators it was made of (leave torch.compile out, and it may be captured)"
)

_OUTSIDE = "gradients add up at parameters that its optimizer does not train"


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
    outside = job.step is None and _has_gradients_outside(job)
    if outside and _runs_users_code(optimizer):
        return f"{_OUTSIDE}, and hooks or a step of the optimizer's own may look at them"
    # Found by names, so perhaps wrongly: no reason to refuse a job that insists on capture.
    if outside and job.capture == "auto" and _step_names_gradients(job):
        return f"{_OUTSIDE}, and the step's code names gradients"
    if job.capture == "auto" and callbacks_use_gradients(job):
        asked = job.on_step or getattr(job.scheduler, "step", None) or job.evaluate
        return f"a callback may look at gradients, or step an optimizer ({users_line(None, asked)})"
    if job.capture == "auto" and data_use_gradients(job):
        where = users_line(None, getattr(type(job.data), "__iter__", None))
        return f"the data may look at gradients, or step an optimizer ({where})"
    return None


def _has_gradients_outside(job: Job) -> bool:
    """Whether it has parameters that get gradients which nothing drops, so that they add up."""
    trained = set(map(id, trained_parameters(job.optimizer)))
    return any(p.requires_grad and id(p) not in trained for p in job.root.parameters())


def _runs_users_code(optimizer: torch.optim.Optimizer) -> bool:
    own = has_hooks(optimizer) or has_own_step(optimizer)
    return own or not is_of_trusted_classes(optimizer)


def _step_names_gradients(job: Job) -> bool:
    roots = {"model": job.root, "loss": job.loss}
    found = Account.take(roots, executed_only=True, packages=Packages.BUT_REPORTERS, limits=LIMITS)
    return any(names_gradients(code) for code in found.codes if not is_trusted_code(code))


def _is_compiled(module: torch.nn.Module) -> bool:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled before
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return frames is not None and isinstance(module, frames.OptimizedModule)
