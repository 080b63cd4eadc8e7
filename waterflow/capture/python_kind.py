"""What of a job's is called as Python, and of what code that is made: what is found of the code of
one job holds for all that are made of the same, as trials are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from waterflow.account.class_parts import (
    CONSTANTS,
    IdentityKey,
    but_constants,
    is_a,
    of_each_class,
    own_attributes,
)
from waterflow.account.trust import keeps_records
from waterflow.job.job import Job

_EMPTY = CellType()
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, dict)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: What a module has by itself: its hooks are looked at, its modules by themselves.
OF_MODULES = frozenset(vars(nn.Module()))
#: Of that, where hooks are.
HOOKS = tuple(name for name in OF_MODULES if "hooks" in name)
#: So far in, so many in one object, and so many of one root, are looked at: a study that a callback
#: reports to holds its sampler some way in.
_DEPTH, _MOST_PARTS, _MOST_OBJECTS = 8, 64, 512


def python_of_job(job: Job) -> dict[str, Any]:
    """What is called in steps, callbacks and evaluations."""
    called = {name: getattr(job, name) for name in ("loss", "step", "on_step", "evaluate")}
    return {"model": job.root, **called}


class _TooMuchError(Exception):
    """They hold too much to tell."""


def kind_of_python(roots: Mapping[str, Any]) -> Hashable:
    """Equal for roots that are made of the same functions and classes, and for no others; None
    where they hold too much to tell, or refuse to be looked at."""
    try:
        return tuple(map(_kind_of_root, roots.values()))
    except Exception:  # `_TooMuchError`, and whatever objects raise
        return None


def rough_kind(roots: Mapping[str, Any]) -> Hashable:
    """The same, by the code of functions, and the classes of all else and of models' modules,
    alone."""
    modules = (m for root in roots.values() if is_a(root, nn.Module) for m in root.modules())
    own = tuple(code_of(root) or IdentityKey(type(root)) for root in roots.values())
    try:
        return own, frozenset(IdentityKey(type(module)) for module in modules)
    except Exception:  # a model that refuses to be looked at
        return None


def code_of(function: Any) -> CodeType | None:
    """The code of a function or bound method; None of anything else that is called."""
    function = getattr(function, "__func__", function)
    return function.__code__ if type(function) is FunctionType else None


def _kind_of_root(root: Any) -> Hashable:
    if is_a(root, nn.Module):
        return frozenset(map(_kind_of_module, root.modules()))
    return None if root is None else _kind_of(root, _DEPTH, iter(range(_MOST_OBJECTS)))


def _kind_of_module(module: nn.Module) -> Hashable:
    """A module's class, and what it has of its own: hooks, a forward put in place."""
    held = vars(module)
    own = [value for name, value in held.items() if name not in OF_MODULES]
    hooks = [held[name] for name in HOOKS if held.get(name)]
    weights = held.get("_parameters", {}).values()
    left = iter(range(_MOST_OBJECTS))
    return IdentityKey(type(module)), _kinds_of((*own, *hooks, *weights), _DEPTH, left)


def _kinds_of(values: Iterable[Any], depth: int, left: Iterator[int]) -> tuple[Hashable, ...]:
    return tuple(_kind_of(value, depth, left) for value in values if not _says_nothing(value))


def _kind_of(value: Any, depth: int, left: Iterator[int]) -> Hashable:
    """A function's code or an object's class, and the same of all that it holds.

    Args:
        value: the function or object.
        depth: so far in is looked.
        left: has an item for each object that may yet be looked at.
    """
    if is_a(value, type):
        return IdentityKey(value)
    parts = [part for part in _parts_of(value) if not _says_nothing(part)]
    if len(parts) > (_MOST_PARTS if depth else 0) or next(left, None) is None:
        raise _TooMuchError
    name = value.__qualname__ if is_a(value, BuiltinFunctionType) else None
    own = value.__code__ if is_a(value, FunctionType) else IdentityKey(type(value))
    return own, name, _kinds_of(parts, depth - 1, left)


def _says_nothing(value: Any) -> bool:
    reader = _reader_of(type(value))
    return reader is _no_parts or (reader is _hooks_of_tensor and not reader(value))


def _parts_of(value: Any) -> list[Any]:
    """What an object holds that may be called by whoever has it."""
    return _reader_of(type(value))(value)


@of_each_class
def _reader_of(kind: Any) -> Callable[[Any], list[Any]]:
    """How that is found in objects of a class; `_no_parts` where walks, too, pass by them, as by a
    study's trials, however many there are by now."""
    if kind in CONSTANTS or keeps_records(kind):
        return _no_parts
    for known, reader in _READERS.items():
        if issubclass(kind, known):
            return reader
    held = [base for base in _CONTAINERS if issubclass(kind, base)]
    return functools.partial(_held_by, issubclass(kind, functools.partial), held)


def _no_parts(value: Any) -> list[Any]:
    return []


def _hooks_of_tensor(value: Any) -> list[Any]:
    return [hooks for name in _TENSOR_HOOKS if (hooks := getattr(value, name))]


def _held_by_function(value: Any) -> list[Any]:
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
    return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


#: Of classes whose objects hold it elsewhere than in attributes.
_READERS: dict[type, Callable[[Any], list[Any]]] = {
    ModuleType: lambda value: [],  # is told apart by its class alone
    torch.Tensor: _hooks_of_tensor,
    FunctionType: _held_by_function,
    MethodType: lambda value: [value.__func__, value.__self__],
    BuiltinFunctionType: lambda value: [value.__self__],
}


def _held_by(is_partial: bool, containers: Sequence[Any], value: Any) -> list[Any]:
    """By an object's attributes, and what else it is; no code of its class is run."""
    parts = [held for _, held in own_attributes(value)]
    if is_partial:
        parts += [value.func, *value.args, *value.keywords.values()]
    for base in containers:
        held = dict.values(value) if base is dict else base.__iter__(value)
        parts += but_constants(held)
    return parts
