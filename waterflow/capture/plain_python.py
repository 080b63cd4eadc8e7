"""Whether a job's Python plainly changes nothing but what it makes for itself, and containers in
which it notes something: most trials are torch's modules, a loss and an evaluation of a few lines,
and loaders over tensors. That takes a hundredth of the walk that tells it of all others.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from waterflow.account.bytecode import nested_codes
from waterflow.account.changing_names import (
    CHANGED_KEYWORDS,
    CHANGES_FIRST,
    TAKING,
    changes_all,
    is_in_place,
)
from waterflow.account.class_parts import CONSTANTS, is_a
from waterflow.account.code_names import code_names
from waterflow.account.holders import cells_of
from waterflow.account.places import REGISTRIES
from waterflow.account.stores import Change, stores_of
from waterflow.account.trust import (
    is_reporters_name,
    is_trusted_class,
    is_trusted_code,
    is_trusted_name,
)
from waterflow.capture.python_kind import HOOKS, OF_MODULES

#: So many objects are looked at, at most.
_MOST = 512
_DATA = (DataLoader, Subset, TensorDataset)
_CHANGEABLE = (list, dict, set)
_CONTAINERS = (*_CHANGEABLE, tuple)
_MISSING = object()
_OF_ATTRIBUTES = frozenset(name for name in dis.opmap if "ATTR" in name or "METHOD" in name)

#: As modules and functions of torch's have it that change what they are given.
_IN_PLACE = "inplace"
#: What a class has that no step asks for.
_OF_CLASSES = frozenset({"__init__", "__dict__", "__weakref__", "__doc__", "__annotations__"})
#: What changes iterators and queues alone, which are not plain.
_OF_OTHERS = {"__next__", *TAKING}


@dataclass
class Met:
    """What code reaches.

    Attributes:
        objects: tensors, arrays, modules, containers and loaders.
        changed: those containers in which it notes something: it changes what is in them.
        codes: of functions that are no library's.
        libraries: modules, classes, functions and objects of libraries, by which code has them.
        changes_given: whether code may change tensors that it is given, or has made of others; so
            do modules of torch's that work in place.
    """

    objects: list[Any] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)
    libraries: list[Any] = field(default_factory=list)
    changes_given: bool = False


def met_by_plain(roots: Iterable[Any]) -> Met | None:
    """What code behind these objects reaches, where it is told at once that it changes nothing that
    it has not made, but for what is in some containers. None: it is not known."""
    look = _Look()
    try:
        return look.met if all(map(look.is_plain, roots)) else None
    except Exception:  # whatever objects raise
        return None


def is_of_tensors(change: Change) -> bool:
    """Whether only tensors can be changed in this way, and these come from nowhere known: batches
    and what is made of them."""
    kinds = {origin.kind for origin in change.origins}
    named = change.how == "method" and (is_in_place(change.name) or change.name == "out")
    return named and kinds <= {"parameter", "unknown"}


def bound_to_be_changed(value: functools.partial[Any]) -> list[Any]:
    """What a `partial` has bound that its function changes."""
    found = [value.keywords[name] for name in CHANGED_KEYWORDS if name in value.keywords]
    name = getattr(value.func, "__name__", "")
    if changes_all(name):
        found += [*value.args, *value.keywords.values()]
    elif is_in_place(name) or name in CHANGES_FIRST or name in ("setattr", "delattr"):
        found += value.args[:1]
    return found


class _Variables(NamedTuple):
    """What a function's variables hold that are not its own: those of functions around it, and
    global ones."""

    cells: Mapping[str, Any]
    known: Mapping[str, Any]


class _Look:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.met = Met()

    def is_plain(self, value: Any) -> bool:
        kind = type(value)
        if kind in CONSTANTS or id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if len(self._seen) > _MOST:
            return False
        if kind is FunctionType:
            return self._is_plain_function(value)
        if is_a(value, nn.Module):
            self.met.objects.append(value)
            return self._is_plain_module(value)
        if kind is np.ndarray:
            self.met.objects.append(value)
            return True
        if kind in (torch.Tensor, nn.Parameter):
            self.met.objects.append(value)
            return not value._backward_hooks and not vars(value)
        if kind in _CONTAINERS:
            self.met.objects += (value,) * (kind in _CHANGEABLE)
            return all(map(self.is_plain, value.values() if kind is dict else value))
        if kind in _DATA or kind is functools.partial or _is_torchs_sampler(kind):
            self.met.objects.append(value)
            if kind is functools.partial and bound_to_be_changed(value):
                return False
            parts = (value.func, *value.args, value.keywords) if kind is functools.partial else ()
            return all(map(self.is_plain, (*parts, *vars(value).values())))
        return self._is_librarys(value, kind)

    def _is_librarys(self, value: Any, kind: type) -> bool:
        """Whether a library has made it for everybody."""
        self.met.libraries.append(value)
        if is_a(value, ModuleType):
            return is_trusted_name(value.__name__)
        if is_a(value, type):
            return is_trusted_class(value)
        if kind is BuiltinFunctionType:
            return is_a(value.__self__, ModuleType) or value.__self__ is None
        return is_reporters_name(kind.__module__)

    def _is_plain_function(self, value: FunctionType) -> bool:
        code = value.__code__
        if is_trusted_code(code) and not value.__closure__:
            self.met.libraries.append(value)
            return True
        if vars(value) or is_trusted_code(code):
            return False
        names = code_names(code)
        if names.imports:
            return False
        cells = {name: cell.cell_contents for name, cell in cells_of(value)}
        built_in: Mapping[str, Any] = value.__builtins__  # type: ignore[attr-defined]
        found = {name: value.__globals__.get(name, _MISSING) for name in names.global_names}
        known = {name: one for name, one in found.items() if one is not _MISSING}
        if any(name not in known and name not in built_in for name in found):
            return False
        self.met.codes.append(code)
        parts = list(nested_codes(code))
        self.met.changes_given |= any(map(_works_in_place, parts))
        shadowed = frozenset[str]().union(*(part.co_cellvars for part in parts))
        variables = _Variables({k: v for k, v in cells.items() if k not in shadowed}, known)
        for part in parts:
            for change in stores_of(part).changes:
                if is_of_tensors(change):
                    self.met.changes_given = True
                elif not (change.name in _OF_OTHERS or self._is_note(change, part, variables)):
                    return False
        if not self._is_plain_owner(cells.pop("__class__", None)):
            return False
        held = [*cells.values(), *known.values()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return all(map(self.is_plain, held))

    def _is_note(self, change: Change, code: CodeType, variables: _Variables) -> bool:
        """Whether code changes what is in a container that a variable holds, and nothing else."""
        if change.how not in ("item", "method", "operator"):
            return False
        for origin in change.origins:
            if origin.kind != "held" or origin.name in _attributes_in(code):
                return False
            is_cell = origin.name in code.co_freevars
            held = (variables.cells if is_cell else variables.known).get(origin.name)
            if type(held) not in _CHANGEABLE:
                return False
            self.met.changed.append(held)
        return True

    def _is_plain_module(self, value: nn.Module) -> bool:
        held = vars(value)
        if any(held[name] for name in HOOKS):
            return False
        self.met.changes_given |= bool(held.get(_IN_PLACE))
        if not all(map(self._is_plain_class, type(value).__mro__)):
            return False
        parts = [part for name, part in held.items() if name not in OF_MODULES]
        for name in REGISTRIES:
            parts += held[name].values()
        return all(map(self.is_plain, parts))

    def _is_plain_owner(self, kind: Any) -> bool:
        """The same of the class whose method calls others' by `super`; None: it does not."""
        if kind is None:
            return True
        return is_a(kind, type) and all(map(self._is_plain_class, kind.__mro__))

    def _is_plain_class(self, kind: type) -> bool:
        """Whether what a class of modules adds to torch's own is plain, but for what makes one."""
        if is_trusted_class(kind) or id(kind) in self._seen:
            return True
        self._seen.add(id(kind))
        if type(kind) is not type:
            return False
        held = (value for name, value in vars(kind).items() if name not in _OF_CLASSES)
        return all(map(self._is_plain_attribute, held))

    def _is_plain_attribute(self, value: Any) -> bool:
        if type(value) is property:
            return all(self.is_plain(one) for one in (value.fget, value.fset, value.fdel))
        if type(value) is staticmethod:
            value = value.__func__
        return type(value) is not classmethod and self.is_plain(value)


def _is_torchs_sampler(kind: type) -> bool:
    return issubclass(kind, Sampler) and is_trusted_class(kind)


@functools.lru_cache(maxsize=1024)
def _works_in_place(code: CodeType) -> bool:
    """Whether code names the argument by which torch's functions change what they are given."""
    keywords = (one for one in code.co_consts if type(one) is tuple)
    return _IN_PLACE in code.co_names or any(_IN_PLACE in one for one in keywords)


@functools.lru_cache(maxsize=1024)
def _attributes_in(code: CodeType) -> frozenset[str]:
    """The attributes that code names, functions inside it aside."""
    named = (each for each in dis.get_instructions(code) if each.opname in _OF_ATTRIBUTES)
    return frozenset(each.argval for each in named)
