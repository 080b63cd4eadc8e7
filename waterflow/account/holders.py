"""What objects a value may be that bytecode has from somewhere (`origins.Origin`)."""

from __future__ import annotations

import collections
import functools
import gc
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from waterflow.account import places
from waterflow.account.account import Account
from waterflow.account.bytecode import nested_codes
from waterflow.account.class_parts import (
    DICTIONARY_VIEWS,
    but_constants,
    in_slots,
    is_a,
    of_each_class,
)
from waterflow.account.origins import Origin, below
from waterflow.account.stores import Stores
from waterflow.account.trust import is_trusted_class, is_trusted_code

MEMORIES = (torch.Tensor, np.ndarray)
#: Containers that have what they hold in their attributes.
_OF_PYTHON = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
#: So far, and so many objects, is looked into containers.
_DEPTH, _MOST_CONTENTS = 4, 10_000
#: Methods of an object that nobody else has yet.
MAKERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})
#: Methods of a class that need not be marked as such.
OF_CLASSES = frozenset({"__new__", "__init_subclass__", "__class_getitem__"})
#: Classes of objects that hold nothing by a name, as most that a walk meets: modules' registries.
_BARE = frozenset[Any]({dict, list, tuple, set, frozenset, deque, CellType})
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
_EMPTY = CellType()

Given = Callable[[CodeType, int], Iterable[Any] | None]


class Holders:
    """Who holds what by which name, in what some accounts have met."""

    def __init__(self, accounts: Sequence[Account], found: Sequence[Stores], given: Given) -> None:
        """Args beyond the obvious.

        found: what the accounts' code stores.
        given: what a function of some code is called with at a place, if it is known.
        """
        self._accounts = accounts
        self._given_from_outside = given
        self._escapes = frozenset[Origin]().union(*(stores.escapes for stores in found))
        self._aliases = _together(stores.aliases for stores in found)
        self._contents = _together(stores.contents for stores in found)
        self._reads = frozenset[str]().union(*(stores.reads for stores in found))

    def objects_of(self, origin: Origin) -> Iterable[Any]:
        """The objects that a value may be, as far as they are not made by the job's code."""
        if origin.kind == "held":
            return self._held(origin.name)
        if origin.kind == "below":
            return self._within_held(origin.name)
        if origin.kind == "class":
            return self._own_classes
        return self._given(origin) if origin.kind == "parameter" else self._escaped

    def _within_held(self, name: str) -> Iterator[Any]:
        """What is contained in what is held by a name; where code of the user's says what that is,
        anything that it has, or was handed on."""
        held = list(self._held(name))
        yield from within(held, themselves=False)
        computing = [value for value in held if _says_what_it_contains(type(value))]
        if computing:
            yield from self._escaped
            yield from within(one for value in computing for _, one in attributes_of(value))

    def known_by(self, origins: Iterable[Origin]) -> Iterable[Origin]:
        """These, and what is stored by their names while code runs."""
        found, waiting = dict[Origin, None](), deque(origins)
        while waiting:
            origin = waiting.popleft()
            if origin in found:
                continue
            found[origin] = None
            stored = self._aliases.get(origin.name, frozenset())
            if origin.kind == "held":
                waiting += stored
            elif origin.kind == "below":
                waiting += below(stored)
                waiting += self._contents.get(origin.name, ())
        return found

    @property
    def iterators_handed_on(self) -> list[Any]:
        """Those of `_escaped` that whoever has them moves by going through them."""
        return [value for value in self._escaped if is_iterator(value)]

    @functools.cached_property
    def _escaped(self) -> list[Any]:
        """What anybody's code may have been handed, but for tensors: by the job's code, or bound to
        a function before it."""
        bound = [part for value in self.with_names for part in self._bound(value)]
        found: dict[int, Any] = {id(value): value for value in within(bound)}
        for origin in self.known_by(self._escapes):
            if origin.kind in ("held", "below"):
                held = self._plainly_held(origin.name)
                for value in within(held, themselves=origin.kind == "held"):
                    found[id(value)] = value
            elif origin.kind == "parameter" and origin.code is not None:
                for function in self.functions.get(origin.code, ()):
                    held = (d for d in _defaults(function, origin.name) if is_a(d, CONTAINERS))
                    for value in within(held):
                        found[id(value)] = value
        return [value for value in found.values() if not is_a(value, torch.Tensor)]

    def _bound(self, value: Any) -> Iterable[Any]:
        """What a function is given whenever it is called by this name, but for methods of what has
        them by its class; what a weak reference returns."""
        if is_a(value, functools.partial):
            return *value.args, *value.keywords.values()
        if is_a(value, weakref.ref):
            return (weakref.ref.__call__(value),)
        function = value.__func__ if is_a(value, MethodType) else None
        if type(function) is not FunctionType or is_trusted_code(function.__code__):
            return ()
        return () if function.__code__ in self._owners else (value.__self__,)

    def _held(self, name: str) -> Iterator[Any]:
        """What is held by a name now, or was found by code that computes it."""
        yield from self._plainly_held(name)
        if name in self._computed:
            yield from self._escaped
            kinds = tuple(self._computed[name])
            for value in (value for value in self.with_names if is_a(value, kinds)):
                yield from parts_of(value)
                yield from (held for _, held in attributes_of(value))

    def _plainly_held(self, name: str) -> Iterator[Any]:
        """By objects, classes, modules, variables of functions."""
        yield from self._by_name.get(name, ())
        if name == "environ":  # a library's, which no account has
            yield os.environ
        for namespace in self._namespaces:
            if name in namespace:
                yield namespace[name]

    @functools.cached_property
    def _namespaces(self) -> list[dict[str, Any]]:
        found = [p for a in self._accounts for p in a.own_places if isinstance(p, places.Names)]
        return list({id(place.namespace): place.namespace for place in found}.values())

    @functools.cached_property
    def objects(self) -> list[Any]:
        """All objects that were met."""
        return [value for account in self._accounts for value in account.own_objects]

    @functools.cached_property
    def with_names(self) -> list[Any]:
        """Those of them that may hold something by a name, or be called."""
        return [value for value in self.objects if not _is_bare(value)]

    @functools.cached_property
    def _own_classes(self) -> list[type]:
        found = {id(kind): kind for account in self._accounts for kind in account.own_classes}
        return [kind for kind in found.values() if not is_trusted_class(kind)]

    @functools.cached_property
    def _computed(self) -> dict[str, list[type]]:
        """Attributes that are computed, by properties and their like, and the classes of whose
        objects: of what these hold it may be anything."""
        plain = (FunctionType, staticmethod, classmethod, *CONTAINERS, *MEMORIES)
        found: dict[str, list[type]] = {}
        for kind in self._own_classes:
            for name, value in vars(kind).items():
                is_slot = is_a(value, (GetSetDescriptorType, MemberDescriptorType))
                if hasattr(type(value), "__get__") and not (is_slot or is_a(value, plain)):
                    found.setdefault(name, []).append(kind)
        return found

    @functools.cached_property
    def _by_name(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for value in self.with_names:
            attributes = list(attributes_of(value))
            if not _is_lock_among(attributes):  # what it holds is its own affair, too
                for name, held in attributes:
                    found.setdefault(name, []).append(held)
        for kind in self._own_classes:
            for name, held in vars(kind).items():
                found.setdefault(name, []).append(held)
        return found

    def reads(self, value: Any) -> bool:
        """Whether code may do more with an object than to add to it, by the names that it has; one
        that is a function's default or in a container is no matter of names."""
        names = {name for name, held in self._by_name.items() if any(v is value for v in held)}
        names |= {n for space in self._namespaces for n, v in space.items() if v is value}
        inside = [
            part for each in self.objects if is_a(each, CONTAINERS) for part in parts_of(each)
        ]
        for functions in self.functions.values():
            inside += [d for f in functions for d in (f.__defaults__ or ())]
            inside += [d for f in functions for d in (f.__kwdefaults__ or {}).values()]
        if any(part is value for part in inside):
            return True
        return "*" in self._reads or not names.isdisjoint(self._reads)

    @functools.cached_property
    def functions(self) -> dict[CodeType, list[FunctionType]]:
        """The functions of each code, or around it."""
        found: dict[CodeType, list[FunctionType]] = {}
        for value in self.with_names:
            if type(value) is FunctionType and not is_trusted_code(value.__code__):
                for code in nested_codes(value.__code__):
                    found.setdefault(code, []).append(value)
        return found

    @functools.cached_property
    def _owners(self) -> dict[CodeType, list[type]]:
        """The classes whose methods have a code."""
        found: dict[CodeType, list[type]] = {}
        for kind in self._own_classes:
            for value in vars(kind).values():
                for function in functions_of(value):
                    found.setdefault(function.__code__, []).append(kind)
        return found

    @functools.cached_property
    def _of_classes(self) -> set[CodeType]:
        """Of methods that are called on a class."""
        held = [(name, value) for kind in self._own_classes for name, value in vars(kind).items()]
        methods = [v for name, v in held if name in OF_CLASSES or is_a(v, classmethod)]
        return {function.__code__ for value in methods for function in functions_of(value)}

    def owners_of(self, origin: Origin) -> tuple[type, ...] | None:
        """Where it is what a method was called on, the classes that have the method."""
        code = origin.code
        if origin.kind != "parameter" or code is None or code.co_varnames[0] != origin.name:
            return None
        return tuple(self._owners[code]) if code in self._owners else None

    def _given(self, origin: Origin) -> Iterator[Any]:
        """What a parameter may be."""
        code = origin.code
        assert code is not None
        for function in self.functions.get(code, ()):
            yield from _defaults(function, origin.name)
        owners = self.owners_of(origin)
        if owners is not None:
            if origin.name == "cls" or code in self._of_classes:
                yield from owners
            elif code.co_name not in MAKERS:
                yield from (value for value in self.with_names if is_a(value, owners))
            return
        place = code.co_varnames.index(origin.name) - (code in self._owners)
        known = self._given_from_outside(code, place)
        yield from self._escaped if known is None else known


def _together(
    found: Iterable[Mapping[str, frozenset[Origin]]],
) -> dict[str, frozenset[Origin]]:
    together: dict[str, frozenset[Origin]] = {}
    for each in found:
        for name, origins in each.items():
            together[name] = together.get(name, frozenset()) | origins
    return together


def _is_bare(value: Any) -> bool:
    kind = type(value)
    return kind in _BARE or (kind is OrderedDict and not vars(value))


@of_each_class
def _says_what_it_contains(kind: type) -> bool:
    """Whether a class of the user's has methods of its own for that."""
    own = (one for one in kind.__mro__ if not is_trusted_class(one))
    return any(name in vars(one) for one in own for name in ("__getitem__", "__iter__"))


def is_iterator(value: Any) -> bool:
    """Whether an object is moved by going through it."""
    return hasattr(type(value), "__next__")


def has_lock(value: Any) -> bool:
    """Whether an object has a lock of its own: it is made for several threads."""
    return _is_lock_among(attributes_of(value))


def _is_lock_among(attributes: Iterable[tuple[str, Any]]) -> bool:
    return any(is_a(held, _LOCKS) for _, held in attributes)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What is held by an object's attributes, a module's parameters and submodules among them, or
    by the variables around a function."""
    if type(value) is FunctionType:
        for name, cell in cells_of(value):
            if cell != _EMPTY:
                yield name, cell.cell_contents
        return
    held = getattr(value, "__dict__", None) if not is_a(value, (type, ModuleType)) else None
    if type(held) is dict:
        yield from [(name, one) for name, one in held.items() if type(name) is str]
        if is_a(value, nn.Module):
            for name in places.REGISTRIES:
                yield from list((held.get(name) or {}).items())
    if is_a(value, MethodType):
        yield "__self__", value.__self__
    yield from in_slots(value)


def cells_of(function: FunctionType) -> Iterable[tuple[str, CellType]]:
    """The variables around a function."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions of what a class has by a name."""
    if is_a(value, (staticmethod, classmethod)):
        value = value.__func__
    parts = (value.fget, value.fset, value.fdel) if is_a(value, property) else (value,)
    for part in (*parts, getattr(value, "func", None), getattr(value, "__wrapped__", None)):
        if type(part) is FunctionType:
            yield part


def _defaults(function: FunctionType, name: str) -> Iterator[Any]:
    code = function.__code__
    known = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    # Whoever wraps a function may give the wrapper more defaults than it has parameters.
    found = dict(zip(reversed(known), reversed(defaults), strict=False))
    found.update(function.__kwdefaults__ or {})
    if name in found:
        yield found[name]


def within(values: Iterable[Any], themselves: bool = True) -> Iterator[Any]:
    """What objects contain, and they themselves: else only arrays, of which there are views."""
    waiting, seen = deque((value, 0) for value in values), set[int]()
    while waiting and len(seen) < _MOST_CONTENTS:
        value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if depth or themselves or is_a(value, MEMORIES):
            yield value
        if depth < _DEPTH:
            waiting.extend((part, depth + 1) for part in parts_of(value))


def parts_of(value: Any) -> list[Any]:
    """What a container holds, or a module in its registries."""
    if is_a(value, DICTIONARY_VIEWS):
        return gc.get_referents(value)
    if is_a(value, _OF_PYTHON):
        return list(vars(value).values())
    if is_a(value, dict):
        return list(dict.values(value))
    if is_a(value, nn.Module):
        held = vars(value)
        return [part for name in places.REGISTRIES for part in (held.get(name) or {}).values()]
    base: Any = next((base for base in CONTAINERS if is_a(value, base)), None)
    return [] if base is None else but_constants(base.__iter__(value))  # runs nobody's own code
