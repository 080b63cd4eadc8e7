"""Notices what a trace would silently freeze: Python state and random numbers outside torch."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.tracing import functions_of, is_of_job

_MISSING = object()
#: Registered tensors are looked after elsewhere; an optimizer's groups and state are swapped.
_SKIPPED = {
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_non_persistent_buffers_set",
    "param_groups",
    "state",
    "_opt_called",  # set by step() for the schedulers
}

#: Changed by the first step only, without an effect on its numbers.
_SETTLES = {"_need_device_dtype_check_for_fused"}

#: A place that keeps Python state: what to call it, and its dictionary.
_Place = tuple[str, dict[str, Any]]


class StateWatch:
    """Remembers Python state on both sides of a trace.

    Watched are the attributes of the model's modules, of the optimizer, and whatever plain values
    and lists the loss function reaches through its closure, its object or its globals.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """Remembers the state as it is now, and that of the random generators."""
        self._places = list(_places(model, optimizer, loss))
        self._before = [_attributes(holder) for _, holder in self._places]
        self._cells = _cells(loss)
        self._contents = [_copied(_content(cell)) for _, cell in self._cells]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._drawn: str | None = None
        self.torch_generator_touched = False

    def problem(self) -> str | None:
        """What has changed since; everything is put back as it was."""
        problems = [self._changed_attribute(), self._changed_cell(), self._drawn_number()]
        return next((problem for problem in problems if problem), None)

    def _changed_attribute(self) -> str | None:
        problem = None
        for (name, holder), before in zip(self._places, self._before, strict=True):
            after = _attributes(holder)
            for key in before.keys() | after.keys():
                if not _same(before.get(key, _MISSING), after.get(key, _MISSING)):
                    _put_back(holder, key, before.get(key, _MISSING))
                    if key not in _SETTLES:
                        problem = _frozen(name.format(key))
        return problem

    def _changed_cell(self) -> str | None:
        problem = None
        for (name, cell), before in zip(self._cells, self._contents, strict=True):
            if not _same(before, _copied(_content(cell))):
                problem = _frozen(f"changes the variable {name!r} around it")
                holder = {name: _content(cell)}
                _put_back(holder, name, before)
                cell.cell_contents = holder[name]
        return problem

    def _drawn_number(self) -> str | None:
        if self._drawn is None:
            return None
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        return f"the step draws from {self._drawn}, a captured step would repeat the number"

    @contextlib.contextmanager
    def generators(self) -> Iterator[None]:
        """Notices draws from Python's and numpy's generators, and whoever sets torch's.

        Data loaders of other jobs draw meanwhile, so only this thread's calls count. Requires
        TRACE_LOCK, as it patches modules.
        """
        patched = [
            *((torch, name, self._torch_call) for name in _TORCH_GENERATOR),
            *((torch.random, name, self._torch_call) for name in _TORCH_GENERATOR),
            *((random, name, self._python_call) for name in _methods_of(random, random.Random)),
            *((np.random, n, self._numpy_call) for n in _methods_of(np.random, _NumpyState)),
        ]
        saved = [(m, n, getattr(m, n), call) for m, n, call in patched if hasattr(m, n)]
        owner = threading.get_ident()
        for module, name, original, call in saved:
            setattr(module, name, _in_thread(owner, original, call))
        try:
            yield
        finally:
            for module, name, original, _ in saved:
                setattr(module, name, original)

    def _torch_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.torch_generator_touched = True
        return original(*args, **kwargs) if original.__name__ == "get_rng_state" else None

    def _python_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._drawn = "Python's random module"
        return original(*args, **kwargs)

    def _numpy_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._drawn = "numpy.random"
        return original(*args, **kwargs)


_TORCH_GENERATOR = ("get_rng_state", "set_rng_state", "manual_seed", "seed")
_NumpyState = np.random.RandomState


def _methods_of(module: ModuleType, kind: type) -> list[str]:
    """Functions of a module that are methods of its hidden generator."""
    return [n for n, v in vars(module).items() if isinstance(getattr(v, "__self__", None), kind)]


def _in_thread(
    owner: int, original: Callable[..., Any], call: Callable[..., Any]
) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:  # another thread has nothing to do with this
            return original(*args, **kwargs)
        return call(original, *args, **kwargs)

    return watched


def _frozen(change: str) -> str:
    return (
        f"the step {change}, and a captured step would not (a tensor that must persist belongs in "
        "a buffer of the model)"
    )


def _places(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loss: Callable[..., Any] | None
) -> Iterator[_Place]:
    yield from _module_places(model, "the model's attribute")
    if optimizer is not None:
        yield "changes the optimizer's attribute '{}'", vars(optimizer)
    seen = {id(module) for module in model.modules()}
    for name, value in _reached(loss):
        if isinstance(value, nn.Module):
            if id(value) not in seen:
                yield from _module_places(value, f"an attribute of {name!r},")
        elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType)):
            yield f"changes the attribute '{{}}' of {name!r}", vars(value)
    for function in functions_of(loss):
        used = {key: function.__globals__.get(key) for key in function.__code__.co_names}
        if any(_is_plain(value) for value in used.values()):
            names = [key for key, value in used.items() if _is_plain(value)]
            yield "changes the global variable '{}'", _Globals(function.__globals__, names)


class _Globals(dict[str, Any]):
    """The plain globals that a function names; changes go through to the module."""

    def __init__(self, namespace: dict[str, Any], names: list[str]) -> None:
        super().__init__()
        self.namespace, self.names = namespace, names

    def items(self) -> Any:
        return {key: self.namespace[key] for key in self.names if key in self.namespace}.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self.namespace.get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        self.namespace[key] = value


def _module_places(model: nn.Module, what: str) -> Iterator[_Place]:
    for name, module in model.named_modules():
        place = f"{name}.{{}}" if name else "{}"
        yield f"changes {what} '{place}'", vars(module)


def _cells(loss: Callable[..., Any] | None) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for function in functions_of(loss):
        cells = function.__closure__ or ()
        found += list(zip(function.__code__.co_freevars, cells, strict=True))
    return [(name, cell) for name, cell in found if _content(cell) is not _MISSING]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _MISSING


def _reached(loss: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """Objects that may keep state between calls of the loss function, by name."""
    for name, cell in _cells(loss):
        yield name, _content(cell)
    owner = getattr(loss, "__self__", None)
    if owner is None and not isinstance(loss, (FunctionType, type(None))):
        owner = loss
    if owner is not None:
        yield type(owner).__name__, owner
    for function in functions_of(loss):
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, nn.Module):
                yield name, value


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float, bool, str, list, dict, set)


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in holder.items():
        if key in _SKIPPED or (key.startswith("_") and key.endswith("hooks")):
            continue
        found[key] = _copied(value)
    return found


def _copied(value: Any) -> Any:
    if type(value) in (list, dict, set):
        return value.copy()
    return value


def _same(before: Any, after: Any) -> bool:
    if before is after:  # one that a capture made is kept from a trace before this one
        return not isinstance(after, FakeTensor) or is_of_job(after)
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


def _put_back(holder: dict[str, Any], key: str, value: Any) -> None:
    current: Any = holder.get(key)
    if value is _MISSING:
        holder.pop(key, None)
    elif isinstance(value, list) and type(current) is list:
        current[:] = value
    elif isinstance(value, (set, dict)) and type(current) is type(value):
        current.clear()
        current.update(value)
    else:
        holder[key] = value
