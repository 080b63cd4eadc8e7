"""What every step of a job calls of torch's beside the job's own Python: it is to be torch's own.

The engine drops gradients as `Optimizer.zero_grad` does, and clips them by torch's functions. None
of the job's Python leads there, so no account has it; whoever replaces one of these, for a job or
for all, has the steps made eagerly, which call what is there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from waterflow.account.class_parts import watch_class
from waterflow.account.trust import is_trusted_code
from waterflow.allocator_ext import _C
from waterflow.job.job import Job
from waterflow.job.several import optimizers_in

_CLIPPING: Any = sys.modules["torch.nn.utils.clip_grad"]
#: Functions through which gradients are clipped: (module, names).
_CLIPS: tuple[tuple[Any, frozenset[str]], ...] = (
    (torch.nn.utils, frozenset({"clip_grad_norm_", "clip_grad_value_"})),
    (_CLIPPING, frozenset(name for name, _ in inspect.getmembers(_CLIPPING, inspect.isfunction))),
)


def has_own_zero_grad(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients may outlive a step: torch's own ``zero_grad`` would drop them."""
    torchs = torch.optim.Optimizer.zero_grad
    own = type(optimizer).zero_grad is not torchs or "zero_grad" in vars(optimizer)
    return own or not is_trusted_code(torchs.__code__)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody has hung hooks on an optimizer, of whatever kind."""
    return any(value for name, value in vars(optimizer).items() if "hooks" in name)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the object has a ``step`` that is not its class's, even within the wrapper of torch's
    schedulers: that knows the optimizer, and nothing that stands for it in a trace."""
    step: Any = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        return step.__wrapped__ is not type(optimizer).step
    return step is not None


def clips_by_others(job: Job) -> bool:
    """Whether its gradients are clipped by functions that are not torch's own."""
    if not job.rules.clips:
        return False
    return not all(is_trusted_code(inspect.unwrap(each).__code__) for each in _clipping())


def watch_calls(job: Job) -> _C.Guards:
    """Guards that hold as long as a job's steps call what they call now."""
    guards = _C.Guards()
    for optimizer in optimizers_in(job.optimizer):
        guards.attributes(optimizer, {"zero_grad"}, None)
        watch_class(guards, type(optimizer), "zero_grad")
    if isinstance(torch.optim.Optimizer.zero_grad, FunctionType):
        guards.function(torch.optim.Optimizer.zero_grad)
    if job.rules.clips:
        for module, names in _CLIPS:
            guards.attributes(module, set(names), None)
        for function in _clipping():
            guards.function(function)
    return guards


def _clipping() -> Iterator[Any]:
    for module, names in _CLIPS:
        yield from (getattr(module, name) for name in names)
