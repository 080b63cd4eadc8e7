"""What surrounds the caller's thread when it submits a job: the job's Python runs in the same.

Autocast, gradient mode, function and dispatch modes, hooks for saved tensors and context variables
belong to a thread; the loop that a job stands for would run in the caller's, the job runs on
others.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow.allocator_ext import _C
from waterflow.executor.run.rng import JobRng

Result = TypeVar("Result")

_DEVICES = ("cpu", "cuda")


class CallerContext:
    """The thread-local context of the thread that makes it.

    Attributes:
        opaque: why steps cannot be captured in it; None where they can.
        kind: equal for contexts in which the same code is traced to the same; None where that is
            not known. Context variables aside: those that code reads are in its account.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._state = _C.ThreadState()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _DEVICES
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._thread: int | None = None  # that is inside
        self.opaque = self._why_opaque()
        self.kind = self._kind()

    def _why_opaque(self) -> str | None:
        modes = [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]
        if modes:
            return f"the torch function mode {type(modes[-1]).__name__} surrounds the run"
        dispatch = _get_current_dispatch_mode_stack()
        if dispatch:
            return f"the torch dispatch mode {type(dispatch[-1]).__name__} surrounds the run"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "hooks for saved tensors surround the run"
        if self._cache and any(enabled for _, enabled, _ in self._autocast):
            return (
                "autocast surrounds the whole run and caches weights that were cast, as long as it "
                "is open (put it into the loss function, or cache_enabled=False)"
            )
        return None

    def _kind(self) -> Hashable:
        modes = _get_current_function_mode_stack()
        if self.opaque is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        return (
            tuple(str(mode.device) for mode in modes if isinstance(mode, DeviceContext)),
            tuple(self._autocast),
            self._cache,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._is_fwd_grad_enabled(),
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        )

    def copy(self) -> CallerContext:
        """The same context, whose variables then change by themselves."""
        twin = copy.copy(self)
        twin._variables = self._variables.copy()
        twin._thread = None
        return twin

    def run(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """Calls a function in this context, with these random streams. One thread at a time; what
        is called may itself call others in it."""
        if self.is_inside:
            return function()

        def inside() -> Result:
            self._thread = threading.get_ident()
            try:
                with self._entered(), rng.scope():
                    return function()
            finally:
                self._thread = None

        return self._variables.run(inside)

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is in this context."""
        return self._thread == threading.get_ident()

    def look(self, function: Callable[[], Result]) -> Result:
        """Calls what only looks at context variables, at any time."""
        return self._variables.copy().run(function)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Inside, the calling thread has this context."""
        before = [torch.get_autocast_dtype(device) for device in _DEVICES]
        cache = torch.is_autocast_cache_enabled()
        with _C.ThreadStateScope(self._state):
            self._set_autocast([dtype for *_, dtype in self._autocast], self._cache)
            try:
                yield
            finally:
                self._set_autocast(before, cache)

    def _set_autocast(self, dtypes: list[torch.dtype], cache: bool) -> None:
        for device, dtype in zip(_DEVICES, dtypes, strict=True):
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
