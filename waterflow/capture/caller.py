"""What surrounds the caller's thread when it submits a job: the job's Python runs in the same.

Autocast, gradient mode, function and dispatch modes, hooks for saved tensors and context variables
belong to a thread; the loop that a job stands for would run in the caller's, the job runs on
others. How denormals are dealt with and the number of intra-op threads, once the job's Python has
set it, go with the job as well, and stay away from others that run on the same threads. Who only
watches jobs has a context of his own, too.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow.allocator_ext import _C
from waterflow.executor.run.rng import JobRng, outside
from waterflow.executor.run.threads import ThreadSettings

Result = TypeVar("Result")

_CHANGED = (
    "its Python has changed the state of its thread and left it so (autocast, gradient mode, a "
    "mode that was entered), of which what was captured before knows nothing"
)


def _default_device() -> object:
    """The mode that `torch.set_default_device` has entered here and leaves at its next call."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


class CallerContext:
    """The thread-local context of the thread that makes it.

    Attributes:
        opaque: why steps cannot be captured in it; None where they can. It may come later: captured
            steps run with what lanes have.
        is_outdated: whether something has been changed beside whoever is inside (`run_beside`), who
            is to leave: it holds from the next entry on.
        kind: equal for contexts in which the same code is traced to the same; None where that is
            not known. Context variables aside: those that code reads are in its account.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._state = _C.ThreadState()
        self._default_device = _default_device()
        self._entering = threading.Lock()
        self._thread: int | None = None  # that is inside
        self._flushes = ThreadSettings.here().flushes  # intra-op threads are the lanes' own
        self._settings: ThreadSettings | None = None  # that the job's Python has set
        self._begun: ThreadSettings | None = None  # of who is inside, when it came in
        self._changed: list[tuple[contextvars.ContextVar[object], object]] = []
        self.is_outdated = self._has_handed_over = False
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
        casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if casts and torch.is_autocast_cache_enabled():
            return (
                "autocast surrounds the whole run and caches weights that were cast, as long as it "
                "is open (put it into the loss function, or cache_enabled=False)"
            )
        return None

    def _kind(self) -> Hashable:
        modes = _get_current_function_mode_stack()
        if self.opaque is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        casts = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
        ]
        return (
            tuple(str(mode.device) for mode in modes if isinstance(mode, DeviceContext)),
            tuple(casts),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._is_fwd_grad_enabled(),
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        )

    def run(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """Calls a function in this context, with these random streams. One thread at a time; what
        is called may itself call others in it."""
        if self.is_inside:
            return function()
        with self._entering:  # whoever fetches data may come before a train has left
            return self._variables.run(self._entered, rng, function)

    def run_apart(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """The same beside other calls: what it changes of the context's variables is forgotten."""
        return self._variables.copy().run(self._inside, rng, function)

    def run_for_nothing(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """The same, and what it changes of its thread is forgotten, too."""
        kept = self._state, self._default_device, self._settings
        try:
            return self.run_apart(rng, function)
        finally:
            self._state, self._default_device, self._settings = kept

    def hand_over(self) -> None:
        """Who is inside has others begin where it is itself (`run_beside`)."""
        self._keep_state()
        if (settings := ThreadSettings.here()) != (self._settings or self._begun):
            self._settings = settings
        self._has_handed_over = True

    def run_beside(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """The same, for a thread that is inside and waits for it: what it changes is kept."""
        variables, state, settings = self._variables.copy(), self._state, self._settings
        try:
            return variables.run(self._inside, rng, function)
        finally:
            former = self._variables
            self._changed += [
                (one, value)
                for one, value in variables.items()
                if one not in former or former[one] is not value
            ]
            is_same = self._state is state and self._settings == settings
            self.is_outdated = self.is_outdated or bool(self._changed) or not is_same

    def _entered(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        self._thread = threading.get_ident()
        self.is_outdated = self._has_handed_over = False
        for variable, value in self._changed:
            variable.set(value)
        self._changed.clear()
        try:
            return self._inside(rng, function)
        finally:
            self._thread = None

    def _inside(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        outside = ThreadSettings.here()
        entered = self._settings or outside._replace(flushes=self._flushes)
        if entered != outside:
            self._note(entered, outside)
            entered.set_here()
        if self.is_inside:
            self._begun = entered
        try:
            with _C.ThreadStateScope(self._state):
                return self._watched(rng, function)
        finally:
            left = ThreadSettings.here()
            handed_other = self._has_handed_over_here and self._settings not in (None, left)
            if self._is_to_keep(left != entered or handed_other):
                self._settings = left
            if left != outside:
                self._note(left, outside)
                outside.set_here()

    def _watched(self, rng: JobRng, function: Callable[[], Result]) -> Result:
        """In the loop a mode that is entered and not left holds for all that follows, and so it is
        with this context."""
        modes, outside = _C.ThreadModes(), _default_device()
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self._default_device
        try:
            with rng.scope():
                return function()
        finally:
            changed = _C.ThreadModes() != modes
            if self._is_to_keep(changed or self._has_handed_over_here):
                self._keep_state()
            if changed:
                self.opaque = self.opaque or self._why_opaque() or _CHANGED
            torch._GLOBAL_DEVICE_CONTEXT.device_context = outside

    @property
    def _has_handed_over_here(self) -> bool:
        """Whether the calling thread is inside, and others have begun where it was."""
        return self._has_handed_over and self.is_inside

    def _is_to_keep(self, changed: bool) -> bool:
        """Whether what the calling thread has changed holds from here on: others may have gone on
        from where it was."""
        return changed and not (self.is_outdated and self.is_inside)

    def _keep_state(self) -> None:
        self._state, self._default_device = _C.ThreadState(), _default_device()

    def _note(self, own: ThreadSettings, outside: ThreadSettings) -> None:
        """Captured steps run with what their thread has outside of this context."""
        if self.opaque is None and own.intra_op != outside.intra_op:
            self.opaque = (
                f"its Python has set {own.intra_op} intra-op threads (torch.set_num_threads), and "
                f"captured steps run with those of the lanes, {outside.intra_op} (threads= in run "
                "or Engine sets them)"
            )
        elif self.opaque is None and own.autocasts != outside.autocasts:
            self.opaque = _CHANGED
        elif self.opaque is None:
            self.opaque = (
                "it deals with denormal numbers otherwise than the lanes "
                "(torch.set_flush_denormal: call it once, before the engine is made)"
            )

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread is in this context."""
        return self._thread == threading.get_ident()

    def look(self, function: Callable[[], Result]) -> Result:
        """Calls what only looks at context variables, at any time."""
        return self._variables.copy().run(function)

    def look_at(self, guards: list[_C.Guards]) -> _C.Look:
        """The look at what these guard, in this context, as one call of the extension."""
        return _C.Look(guards, self._variables)


class OnlookerContext:
    """The context of the thread that makes it, for code that watches jobs, on whichever threads.

    These may be in a job's own context. What such code sets is forgotten, and it draws from the
    process's random streams.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._state = _C.ThreadState()

    def run(self, function: Callable[[], Result]) -> Result:
        """Calls a function in this context."""
        return self._variables.copy().run(self._inside, function)

    def _inside(self, function: Callable[[], Result]) -> Result:
        before = ThreadSettings.here()
        try:
            with _C.ThreadStateScope(self._state), outside():
                return function()
        finally:
            if ThreadSettings.here() != before:
                before.set_here()
