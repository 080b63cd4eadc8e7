"""What both traces (forward with backward, and the optimizer) need: one lock, one mode, clear errors."""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from waterflow.partitioner.errors import CaptureError

#: make_fx patches process-wide state: one trace at a time.
TRACE_LOCK = threading.RLock()

WAYS_OUT = (
    "Ways out: change that line so that it does not depend on values or on Python state, or give "
    "the job capture=False (its steps run as eager Python: same numbers, no memory flow)."
)

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def users_line(error: BaseException | None, fallback: Callable[..., Any] | None = None) -> str:
    """Where in the user's code an error arose, as ``file:line in function``."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
    code = getattr(fallback, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return "the model's code"


def capture_error(job: str, reason: str, where: str) -> CaptureError:
    """The error for a step that cannot be captured exactly."""
    return CaptureError(f"job {job!r} cannot be captured at {where}: {reason}. {WAYS_OUT}")


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no memory; foreign real tensors become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace(
    function: Callable[[Any], Any], mode: FakeTensorMode, tensors: list[torch.Tensor]
) -> fx.GraphModule:
    """Records every operator below autograd that ``function(tensors)`` calls on fake tensors."""

    def plain(tensors: Any) -> Any:  # make_fx looks at the signature; bound methods mislead it
        return function(tensors)

    with TRACE_LOCK, mode, torch.autograd.set_multithreading_enabled(False):
        return make_fx(plain, tracing_mode="real", _allow_non_fake_inputs=True)(tensors)


def nodes_so_far() -> int:
    """How many nodes the running trace has recorded."""
    mode = get_proxy_mode()
    assert mode is not None, "only inside a trace"
    return len(mode.tracer.graph.nodes)


class StateWatch:
    """Notices what a trace would silently freeze: Python state and random numbers outside torch."""

    def __init__(self, model: nn.Module) -> None:
        """Remembers the model's plain attributes and the states of the random generators."""
        self._model = model
        self._before = {name: _attributes(module) for name, module in model.named_modules()}
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self.torch_generator_touched = False

    def problem(self) -> str | None:
        """What has changed since; everything is put back as it was."""
        return self._changed_attribute() or self._drawn_number()

    def _changed_attribute(self) -> str | None:
        problem = None
        for name, module in self._model.named_modules():
            before, after = self._before.get(name, {}), _attributes(module)
            for key in before.keys() | after.keys():
                if _same(before.get(key, _MISSING), after.get(key, _MISSING)):
                    continue
                place = f"{name}.{key}" if name else key
                problem = (
                    f"the model changes its attribute {place!r} during a step, and a captured step "
                    "would not (a tensor that must persist belongs in a buffer)"
                )
                _put_back(module, key, before.get(key, _MISSING))
        return problem

    def _drawn_number(self) -> str | None:
        if random.getstate() != self._python:
            random.setstate(self._python)
            return "the step draws from Python's random module, a captured step would repeat it"
        now = np.random.get_state(legacy=False)
        if repr(now) != repr(self._numpy):
            np.random.set_state(self._numpy)
            return "the step draws from numpy.random, a captured step would repeat the number"
        return None

    @contextlib.contextmanager
    def torch_generator(self) -> Iterator[None]:
        """Notices code that saves, sets or seeds torch's generator (checkpointing does).

        Requires TRACE_LOCK, as it patches torch.
        """
        owner = threading.get_ident()
        names = ("get_rng_state", "set_rng_state", "manual_seed", "seed")
        modules = [torch, torch.random]
        saved = [(m, n, getattr(m, n)) for m in modules for n in names if hasattr(m, n)]

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != owner:  # another thread has nothing to do with this
                    return original(*args, **kwargs)
                self.torch_generator_touched = True
                if original.__name__ == "get_rng_state":
                    return original(*args, **kwargs)
                return None

            return call

        for module, name, original in saved:
            setattr(module, name, watch(original))
        try:
            yield
        finally:
            for module, name, original in saved:
                setattr(module, name, original)


_MISSING = object()
_SKIPPED = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {}
    for key, value in vars(module).items():
        if key in _SKIPPED or (key.startswith("_") and key.endswith("hooks")):
            continue
        found[key] = _copied(value)
    return found


def _copied(value: Any) -> Any:
    if type(value) in (list, dict, set):
        return value.copy()
    return value


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return not isinstance(after, FakeTensor)
    if type(before) is not type(after):
        return False
    if isinstance(before, (int, float, complex, str, bytes)):
        return bool(before == after) or before != before
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_same(before[k], after[k]) for k in before)
    if isinstance(before, set):
        return before == after
    return False


def _put_back(module: nn.Module, key: str, value: Any) -> None:
    if value is _MISSING:
        vars(module).pop(key, None)
    elif type(value) in (list, set) or type(value) is dict:
        current = vars(module).get(key)
        if type(current) is type(value):
            current.clear()
            (current.extend if isinstance(value, list) else current.update)(value)
        else:
            vars(module)[key] = value
    else:
        vars(module)[key] = value
