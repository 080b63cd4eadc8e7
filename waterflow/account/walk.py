"""Walks everything that a step's Python code can read, and adds a check for each place.

The walk goes from the objects given along attributes, items, closures and the globals that code
names. It runs nobody's code on the way: attributes are taken from the dictionaries of objects and
classes, items by the iterators of built-in bases. Each kind of object has a method; whatever has
none is either known not to change or *unwalkable*, and the account says so.
"""

from __future__ import annotations

import abc
import decimal
import functools
import gc
import logging
import math
import os
import threading
import time
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from waterflow.account import places, probes
from waterflow.account.class_parts import (
    CONSTANTS,
    DICTIONARY_VIEWS,
    MEMORIES,
    base_of,
    is_a,
    is_constant_class,
    shared_attributes,
    slots_of,
)
from waterflow.account.code_names import code_names
from waterflow.account.code_walk import NOTHING_LATE, CodeWalk, Entry, Late
from waterflow.account.library import LibraryPart, are_librarys, part_for
from waterflow.account.places import Trail
from waterflow.account.trust import (
    Packages,
    is_trusted_class,
    is_trusted_name,
    keeps_records,
    keeps_switches,
)

#: Containers that passed-by code holds are looked into so deep, so many items of each.
_HANDED_DEPTH, _MOST_HANDED = 3, 512
#: So many objects are walked in any time.
_FEW = 1_000
#: Attributes of classes that nobody calls.
_VALUES = frozenset({str, int, float, bool, type(None), tuple, dict})
#: Larger arrays are not compared.
MOST_BYTES = 16 << 20

_MODULE_NAMES = frozenset(name for name in vars(nn.Module()) if name != "_version")
#: What a logger has that decides nothing of what a step computes.
_OF_LOGGERS = frozenset({"name", "parent", "handlers", "filters", "manager", "_cache"})
#: Under this name `logging.disable` has the level that it was given.
_OF_MANAGERS = frozenset({"_disable"})
_OPTIMIZER_NAMES = frozenset({"param_groups", "state", "defaults"})

_GET_LOGGER: types.CodeType = logging.getLogger.__code__
_READ_ENVIRONMENT: tuple[types.CodeType, ...] = tuple(
    vars(type(os.environ))[name].__code__ for name in ("__getitem__", "__iter__", "__len__")
)


class Limits(NamedTuple):
    """How far a walk goes.

    Attributes:
        objects: where there are more, it ends.
        functions: the same of functions that are not the library's; None: any.
        items: containers of more are met, and not looked into; None: all are.
        until: a time of the thread (`time.thread_time`) at which it ends, where it has met more
            objects than small jobs have.
    """

    objects: int = 200_000
    functions: int | None = None
    items: int | None = None
    until: float = math.inf


class Walk(CodeWalk):
    """One walk; what it found is in its attributes."""

    limits = Limits()
    #: Whether it has not ended before.
    is_whole = True

    def run(self, roots: Mapping[str, Any], late: Late = NOTHING_LATE) -> None:
        """Walks from the objects given, by the names that users know them by."""
        self._aside = late.objects
        for name, value in roots.items():
            if name not in late.roots:
                self.reach(value, Trail(name))
                self._empty()  # so that things are called after the first root that has them
        if any(map(self.executes, _READ_ENVIRONMENT)):
            self._mapping(os.environ._data, Trail("os.environ"))  # type: ignore[attr-defined]
            del self.objects[id(os.environ._data)]  # type: ignore[attr-defined]
        if self._codes is not None and self.executes(_GET_LOGGER):  # any, by its name
            for name, logger in list(logging.root.manager.loggerDict.items()):
                if is_a(logger, logging.Logger):
                    self.reach(logger, Trail(f"logger {name!r}"))
        self._empty()
        if not self.is_whole:  # it tells nothing, so that it may as well end
            return
        self._read_modules_met()
        self._read_library()  # where it leads to what is walked late, that counts
        self._walk_late([(roots[name], Trail(name)) for name in roots if name in late.roots], late)
        self._read_library()
        self._guard_what_was_met()

    def _walk_late(self, roots: list[tuple[Any, Trail]], late: Late) -> None:
        self._aside = frozenset()
        self._skip |= {holder: frozenset(keys) for holder, keys in late.skip.items()}
        for value, trail in [*self._put_aside, *roots]:
            self.reach(value, trail)
            self._empty()
        self._read_modules_met()

    def _read_modules_met(self) -> None:
        scanned: set[str] | None = None
        while scanned != self.module_names and not self._excess():
            scanned = set(self.module_names)
            for module, trail in list(self._modules.values()):
                self._read_module(module, frozenset(scanned), trail)
            self._empty()

    # The library

    def _read_library(self) -> None:
        """Goes where the library's code leads to."""
        if len(self._entries) == self._left:
            return
        self._left, entries = len(self._entries), dict(self._entries)
        codes = None if self._codes is None else frozenset(self._codes)
        key = frozenset(entries), self.names, codes, self.packages
        part = part_for(key, (entries, self._codes), lambda: self._walk_apart(entries))
        asked_apart = (*self._skip, *self._aside)
        if part is not None and part.identities.isdisjoint(asked_apart):
            self.library = part
            return
        self.leaves_library, self.library = False, None
        self._entries.clear()
        self._left = 0
        for met in (self.seen, self.classes, self._read_modules):
            for entry in entries:
                met.pop(entry, None)
        self._walk_entries(entries)
        self._read_modules_met()

    def _walk_apart(self, entries: Mapping[Any, Entry]) -> LibraryPart | None:
        walk = Walk(self.names, None, {})
        walk._codes, walk.limits = (
            self._codes,
            Limits(self.limits.objects),
        )  # nothing is large there
        walk.packages, walk.leaves_library = self.packages, False
        walk._walk_entries(entries)
        met = walk.seen | walk.classes
        finds = (walk.unwalkable, walk.handed_names, walk.module_names)
        if any((*finds, walk.built_ins, walk.libraries)):
            return None
        if not are_librarys(walk.places, walk.codes.values(), met.values()):
            return None
        walk._guard_what_was_met()
        found = walk.guards, walk.places, walk.codes.values(), walk.executes
        return LibraryPart(*found, met, walk.objects, walk._looked_for())

    def _looked_for(self) -> Mapping[int, tuple[dict[str, Any], set[str]]]:
        """The variables of modules that it has looked for, by the identities of these."""
        found: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for (_, names), namespace in self._read_modules.items():
            found.setdefault(id(namespace), (namespace, set()))[1].update(names)
        for value in self.seen.values():
            if type(value) is types.FunctionType and keeps_switches(value.__code__.co_filename):
                namespace, names = value.__globals__, code_names(value.__code__).global_names
                found.setdefault(id(namespace), (namespace, set()))[1].update(names)
        return found

    def _walk_entries(self, entries: Mapping[Any, Entry]) -> None:
        for value, names in sorted(entries.values(), key=_order):
            if is_a(value, types.ModuleType):
                self._read_module(value, names, Trail(value.__name__))
            else:
                self.reach(value, Trail(value.__qualname__))
        self._empty()

    def _guard_what_was_met(self) -> None:
        """Adds the checks of modules' variables and of the library's functions."""
        for namespace, trails in self._globals.values():
            self.guards.keys(namespace, list(trails))
            self.places.append(places.Names(namespace, trails))
        if self._librarys:
            self.guards.functions(self._librarys)
            self.places.append(places.LibraryFunctions(self._librarys))
        if abstract := [kind for kind in self.classes.values() if is_a(kind, abc.ABCMeta)]:
            registered = places.Registered(tuple(abstract))
            self.guards.probe(places.Registered.read, registered, registered.before)
            self.places.append(registered)
        if governed := places.SETTINGS.keys() & (self.libraries | self.governed):
            settings = places.Settings(governed)
            self.guards.probe(places.Settings.read, settings, settings.before)
            self.places.append(settings)

    # Objects

    def _empty(self) -> None:
        while self._waiting:
            if excess := self._excess():
                trail = self._waiting[0][1]
                self._waiting.clear()
                self.is_whole = False
                self.unwalkable.append((trail, excess))
                return
            value, trail = self._waiting.popleft()
            try:
                self._walk(value, trail)
            except Exception as error:  # of a class that answers itself what Python asks it
                self._refuse(value, trail, f"thing that raises {type(error).__name__}")

    def _excess(self) -> str:
        """Of what there is too much; nothing of nothing."""
        objects, functions, _, until = self.limits
        if (met := len(self.seen)) > objects:
            return f"more than {objects} objects"
        if until < math.inf and met > _FEW and time.thread_time() > until:
            return f"more than {met} objects"
        is_much_code = functions is not None and self.functions > functions
        return f"more than {functions} functions" if is_much_code else ""

    def _walk(self, value: Any, trail: Trail) -> None:
        kind = type(value)
        if (method := _METHODS.get(kind)) is not None:
            method(self, value, trail)
        elif kind in probes.PROBES:
            self._probe(value, probes.PROBES[kind], trail)
        elif is_a(value, type):
            self._class(value, trail)
        elif kind.__name__ == "cython_function_or_method":
            self._compiled(value, trail)
        elif is_a(value, torch.Tensor):
            self._tensor(value, trail)
        elif is_a(value, types.ModuleType):
            self._module(value, trail)
        elif is_a(value, logging.Logger):
            self._logger(value, trail)
        elif not is_constant_class(kind):
            self._object(value, trail)
        elif is_a(value, np.generic):
            self.governed.add("numpy")

    def _decimal(self, value: decimal.Decimal, trail: Trail) -> None:
        self.governed.add("decimal")

    def _logger(self, value: logging.Logger, trail: Trail) -> None:
        """Which messages it lets through, and what users keep in it; everybody's, so that sharing
        it says nothing."""
        while value is not None and not is_trusted_name(value.name):
            self.seen[id(value)] = value
            found = self.guards.attributes(value, None, _OF_LOGGERS)
            self.places.append(places.Attributes(trail, value, found, None, _OF_LOGGERS))
            self._levels_disabled(value.manager, trail.attribute("manager"))
            for name, inner in found:
                self.reach(inner, trail.attribute(name))
            above: Any = vars(value).get("parent")
            value, trail = above, trail.attribute("parent")
            if id(value) in self.seen:
                return

    def _levels_disabled(self, manager: logging.Manager, trail: Trail) -> None:
        if id(manager) not in self.seen:
            self.seen[id(manager)] = manager
            found = self.guards.attributes(manager, _OF_MANAGERS, None)
            self.places.append(places.Attributes(trail, manager, found, _OF_MANAGERS, None))

    # Objects with attributes

    def _object(self, value: Any, trail: Trail) -> None:
        kind: Any = type(value)
        if self.packages is not Packages.ALL and keeps_records(kind):
            return
        base = base_of(kind)
        if base is None:
            self._refuse(value, trail)
            return
        self.objects[id(value)] = trail
        self._attributes(value, trail)
        is_passed = self.passes_by(kind)
        for name, descriptor in slots_of(kind):
            if is_passed or self.names is None or name in self.names:
                self._slot(value, descriptor, trail.attribute(name))
        if base is not object:
            _BASE_METHODS[base](self, value, trail)
        if self.packages is not Packages.ALL and any(map(self.passes_by, kind.__mro__)):
            self._hand(value)  # a class of the user's may be derived from one that is passed by
        self._class(kind, Trail(kind.__qualname__))

    def _attributes(self, value: Any, trail: Trail) -> None:
        names, skipped = self._wanted_names(value), self._skipped(value)
        if skipped is None:
            return
        found = self.guards.attributes(value, names, skipped or None)
        if (shared := shared_attributes(value)) is not None:
            self.objects[id(shared)] = trail
        self.places.append(places.Attributes(trail, value, found, names, skipped))
        if names is None and self.names is not None:
            for _, inner in found:
                self._hand(inner)
        if is_a(value, nn.Module):
            found = self._but_empties(found, trail)
        for name, inner in found:
            if name in places.REGISTRIES and type(inner) is dict:
                self._registry(inner, trail)
            else:
                self.reach(inner, trail.attribute(name))

    def _but_empties(self, found: list[tuple[str, Any]], trail: Trail) -> list[tuple[str, Any]]:
        """A module's attributes without its empty dictionaries, which one check looks after."""
        empty = [entry for entry in found if self._is_empty(*entry)]
        if not empty:
            return found
        for _, inner in empty:
            self.seen[id(inner)] = inner
            self.objects[id(inner)] = trail
        self.guards.empties([inner for _, inner in empty])
        self.places.append(places.Empties(trail, empty))
        return [entry for entry in found if id(entry[1]) not in self.seen]

    def _is_empty(self, name: str, value: Any) -> bool:
        own = name in _MODULE_NAMES and type(value) in (dict, OrderedDict) and not value
        known = id(value) in self.seen or id(value) in self._aside or id(value) in self._skip
        return own and not known

    def _wanted_names(self, value: Any) -> frozenset[str] | None:
        kind = type(value)
        kinds = kind.__mro__ if self.packages is Packages.NONE else (kind,)
        if any(map(self.passes_by, kinds)):
            return None  # what its code names is not known: a user's object may be anywhere
        if self.names is None or not is_a(value, (nn.Module, torch.optim.Optimizer)):
            return self.names
        return self._module_attributes if is_a(value, nn.Module) else self._names_of_optimizer

    @functools.cached_property
    def _module_attributes(self) -> frozenset[str]:
        return _MODULE_NAMES | (self.names or frozenset())

    @functools.cached_property
    def _names_of_optimizer(self) -> frozenset[str]:
        return _OPTIMIZER_NAMES | (self.names or frozenset())

    def _hand(self, value: Any, depth: int = _HANDED_DEPTH) -> None:
        """Code that is passed by has this, and may call any method that it has of the user's."""
        if is_a(value, (list, tuple, set, frozenset, dict)) and depth:
            for part in gc.get_referents(value)[:_MOST_HANDED]:
                self._hand(part, depth - 1)
        for kind in type(value).__mro__:
            if not (is_trusted_class(kind) or self.passes_by(kind)):
                own = kind.__dict__.items()
                self.handed_names |= {name for name, part in own if type(part) not in _VALUES}

    def _registry(self, value: dict[str, Any], trail: Trail) -> None:
        """A module's parameters, buffers or modules: called as its attributes."""
        if id(value) not in self.seen:
            self.seen[id(value)] = value
            self._mapping(value, trail, dotted=True)

    def _switch(self, value: Any, trail: Trail) -> None:
        if id(value) not in self.seen:
            self.seen[id(value)] = value
            _METHODS[type(value)](self, value, trail)
            del self.objects[id(value)]  # everybody's, so that sharing it says nothing

    # Containers

    def _mapping(self, value: dict[Any, Any], trail: Trail, dotted: bool = False) -> None:
        self.objects[id(value)] = trail
        skipped = self._skipped(value)
        if skipped is None or self._is_large(value, dict):
            return
        found = self.guards.mapping(value, skipped or None)
        self.places.append(places.Mapping(trail, value, found, skipped, dotted))
        if len(found) > 1 and not skipped and is_a(value, OrderedDict):
            keys = self.guards.items(value, OrderedDict)
            self.places.append(places.Order(trail, value, keys))
        for key, inner in found:
            self.reach(key, trail)
            if type(inner) not in CONSTANTS:
                self.reach(inner, trail.attribute(key) if dotted else trail.item(key))

    def _ordered(self, value: OrderedDict[Any, Any], trail: Trail) -> None:
        """An `OrderedDict`, which has attributes, too."""
        self._attributes(value, trail)
        self._mapping(value, trail)

    def _default_dict(self, value: defaultdict[Any, Any], trail: Trail) -> None:
        self._probe(value, probes.DEFAULT_FACTORY, trail.attribute("default_factory"))
        self._mapping(value, trail)

    def _items(self, value: Any, trail: Trail) -> None:
        base = next(base for base in places.ITEM_BASES if is_a(value, base))
        self.objects[id(value)] = trail
        if self._skipped(value) is None or self._is_large(value, base):
            return
        found = self.guards.items(value, base)
        self.places.append(places.Items(trail, value, base, found))
        self._reach_items(found, trail)

    def _fixed_items(self, value: Any, trail: Trail) -> None:
        base: Any = tuple if is_a(value, tuple) else frozenset
        if not self._is_large(value, base):
            self._reach_items(base.__iter__(value), trail)

    def _is_large(self, value: Any, base: Any) -> bool:
        """Whether a container has more items than are looked at."""
        if self.limits.items is None or base.__len__(value) <= self.limits.items:
            return False
        self.large.append(value)
        return True

    def _reach_items(self, found: Iterable[Any], trail: Trail) -> None:
        for index, inner in enumerate(found):
            if type(inner) not in CONSTANTS:
                self.reach(inner, trail.item(index))

    def _view(self, value: Any, trail: Trail) -> None:
        """A read-only view: of what it shows."""
        for inner in gc.get_referents(value):
            self.reach(inner, trail)

    # Tensors, arrays, and what tells its state when asked

    def _tensor(self, value: torch.Tensor, trail: Trail) -> None:
        kind = type(value)
        self.objects[id(value)] = trail
        if kind not in (torch.Tensor, nn.Parameter) and not issubclass(kind, nn.Buffer):
            self._refuse(value, trail)
            return
        try:
            self.guards.tensor(value)
        except RuntimeError:  # a nested one has no sizes to be compared
            self._refuse(value, trail)
            return
        if value.layout is torch.strided:
            self.objects.setdefault(value.untyped_storage()._cdata, trail)
        self.places.append(places.Tensor(trail, value))
        self._attributes(value, trail)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(value, name):
                self.reach(hooks, trail.attribute(name))
        self._class(kind, Trail(kind.__qualname__))

    def _array(self, value: np.ndarray[Any, Any], trail: Trail) -> None:
        self.governed.add("numpy")
        if value.nbytes > MOST_BYTES:
            self._refuse(value, trail, f"an array above {MOST_BYTES >> 20} MiB")
        elif value.flags.c_contiguous and value.dtype.kind in "biufc":
            self._memory(value, trail)
        else:
            self.objects[id(value)] = trail
            has_objects = value.dtype.hasobject
            probe = probes.OBJECT_ARRAY if has_objects else probes.STRIDED_ARRAY
            self._probe(value, probe, trail)

    def _memory(self, value: Any, trail: Trail) -> None:
        if len(value) > MOST_BYTES if not is_a(value, np.ndarray) else False:
            self._refuse(value, trail, f"an array above {MOST_BYTES >> 20} MiB")
            return
        try:
            self.guards.buffer(value)
        except ValueError:
            self._refuse(value, trail)
            return
        self.objects[id(value)] = trail
        self.places.append(places.Memory(trail, value))

    def _probe(self, value: Any, probe: probes.Probe, trail: Trail) -> None:
        try:
            state, parts = probe.read(value), list(probe.parts(value))
        except Exception:
            self._refuse(value, trail)
            return
        if type(value) in probes.MOVING:
            self.objects[id(value)] = trail
        self.guards.probe(probe.read, value, state)
        self.places.append(places.Probed(trail, value, state, probe))
        for inner in parts:
            self.reach(inner, trail)

    def _memo(self, value: Any, trail: Trail) -> None:
        """Where a result is remembered the function does not run, so nothing else tells of it."""
        self._probe(value, probes.MEMO, trail)
        super()._memo(value, trail)

    def _exception(self, value: BaseException, trail: Trail) -> None:
        self._probe(value, probes.EXCEPTION, trail)

    def _reference(self, value: weakref.ref[Any], trail: Trail) -> None:
        self._probe(value, probes.PROBES[weakref.ref], trail)


def _order(entry: Entry) -> tuple[str, str, list[str]]:
    """One in all processes."""
    value, names = entry
    if is_a(value, types.ModuleType):
        return value.__name__, "", sorted(names)
    return value.__module__, value.__qualname__, []


_METHODS: dict[type, Callable[[Walk, Any, Trail], None]] = {
    dict: Walk._mapping,
    OrderedDict: Walk._ordered,
    defaultdict: Walk._default_dict,
    **dict.fromkeys(places.ITEM_BASES, Walk._items),
    tuple: Walk._fixed_items,
    frozenset: Walk._fixed_items,
    **dict.fromkeys(DICTIONARY_VIEWS, Walk._view),
    types.FunctionType: Walk._function,
    types.MethodType: Walk._method,
    types.BuiltinFunctionType: Walk._bound,
    types.MethodWrapperType: Walk._bound,
    functools.partial: Walk._partial,
    functools.singledispatchmethod: Walk._dispatched,
    probes.Memo: Walk._memo,
    staticmethod: Walk._wrapper,
    classmethod: Walk._wrapper,
    property: Walk._property,
    functools.cached_property: Walk._cached_property,
    types.CellType: Walk._cell,
    type: Walk._class,
    types.ModuleType: Walk._module,
    decimal.Decimal: Walk._decimal,
    np.ndarray: Walk._array,
    **dict.fromkeys(MEMORIES, Walk._memory),
    threading.local: Walk._refuse,  # looks come from other threads than steps
}

_BASE_METHODS: dict[Any, Callable[[Walk, Any, Trail], None]] = {
    dict: Walk._mapping,
    defaultdict: Walk._default_dict,
    **dict.fromkeys(places.ITEM_BASES, Walk._items),
    tuple: Walk._fixed_items,
    frozenset: Walk._fixed_items,
    weakref.ref: Walk._reference,
    BaseException: Walk._exception,
    functools.partial: Walk._partial,
    property: Walk._property,
    staticmethod: Walk._wrapper,
    classmethod: Walk._wrapper,
    functools.cached_property: Walk._cached_property,
}
