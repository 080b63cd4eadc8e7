"""What surrounds the caller's thread when it submits a job: the job's Python runs in the same.

Autocast, gradient mode, function and dispatch modes, hooks for saved tensors and context variables
belong to a thread; the loop that a job stands for would run in the caller's, the job runs on
others.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow.allocator_ext import _C
from waterflow.executor.run.rng import JobRng

Result = TypeVar("Result")


class CallerContext:
    """The thread-local context of the thread that makes it.

    Attributes:
        opaque: why steps cannot be captured in it; None where they can.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._state = _C.ThreadState()
        self.opaque = self._why_opaque()

    def _why_opaque(self) -> str | None:
        modes = [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]
        if modes:
            return f"the torch function mode {type(modes[-1]).__name__} surrounds the run"
        dispatch = _get_current_dispatch_mode_stack()
        if dispatch:
            return f"the torch dispatch mode {type(dispatch[-1]).__name__} surrounds the run"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "hooks for saved tensors surround the run"
        casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if casts and torch.is_autocast_cache_enabled():
            return (
                "autocast surrounds the whole run and caches weights that were cast, as long as it "
                "is open (put it into the loss function, or cache_enabled=False)"
            )
        return None

    def run(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """Calls a function in this context, with these random streams. One call at a time."""
        return self._variables.run(self._inside, rng, function)

    def run_apart(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """The same beside other calls: what it changes of the context's variables is forgotten."""
        return self._variables.copy().run(self._inside, rng, function)

    def _inside(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        with _C.ThreadStateScope(self._state), rng.scope():
            return function()

    def look(self, function: Callable[[], Result]) -> Result:
        """Calls what only looks at context variables, at any time."""
        return self._variables.copy().run(function)

    def look_at(self, guards: list[_C.Guards]) -> _C.Look:
        """The look at what these guard, in this context, as one call of the extension."""
        return _C.Look(guards, self._variables)
