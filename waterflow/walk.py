"""Walks everything that a step's Python code can read, and adds a check for each place.

The walk goes from the objects given along attributes, items, closures and the globals that code
names. It runs nobody's code on the way: attributes are taken from the dictionaries of objects and
classes, items by the iterators of built-in bases. Each kind of object has a method; whatever has
none is either known not to change or *unwalkable*, and the account says so.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from waterflow import places, probes
from waterflow.allocator_ext import _C
from waterflow.classparts import (
    CONSTANTS,
    MEMORIES,
    base_of,
    is_a,
    is_constant_class,
    is_foreign,
    slots_of,
)
from waterflow.codenames import code_names
from waterflow.codeparts import imports_of, nested_codes
from waterflow.places import Trail
from waterflow.trust import (
    is_own_class,
    is_trusted_class,
    is_trusted_code,
    is_trusted_name,
    keeps_switches,
)

#: More objects than this are not walked.
MOST_OBJECTS = 200_000
#: Larger arrays are not compared.
MOST_BYTES = 16 << 20

_IMMUTABLE = 1 << 8  # a flag of classes whose attributes nobody can set
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_MODULE_NAMES = frozenset(name for name in vars(nn.Module()) if name != "_version")
_OPTIMIZER_NAMES = frozenset({"param_groups", "state", "defaults"})
#: Attributes of classes that say nothing which their functions and values do not.
_CLASS_NOISE = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__"),
        *("__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__", "__match_args__"),
        *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
        *("__subclasshook__", "__dataclass_params__", "__protocol_attrs__", "_is_protocol"),
    }
)

_READ_ENVIRONMENT: types.CodeType = vars(type(os.environ))["__getitem__"].__code__

Skipped = Mapping[int, Collection[Any] | None]


class Walk:
    """One walk; what it found is in its attributes."""

    def __init__(
        self,
        names: Collection[str] | None,
        codes: Collection[types.CodeType] | None,
        skip: Skipped,
    ) -> None:
        self.guards = _C.Guards()
        self.places: list[places.Place] = []
        self.unwalkable: list[tuple[Trail, str]] = []
        #: Code of all functions that were met, by identity.
        self.codes: dict[int, types.CodeType] = {}
        #: Objects that can change, by identity, and how they were reached.
        self.objects: dict[int, Trail] = {}
        #: Built-in functions that code names, by identity.
        self.built_ins: dict[int, tuple[types.BuiltinFunctionType, Trail]] = {}
        #: Names of the trusted modules that the user's code names.
        self.libraries: set[str] = set()
        #: Names by which modules are read, as far as functions were met.
        self.module_names: set[str] = set()
        self._names = None if names is None else frozenset(names)
        self._codes = None if codes is None else {id(code): code for code in codes}
        self._skip = {holder: None if k is None else frozenset(k) for holder, k in skip.items()}
        self.seen: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._waiting: deque[tuple[Any, Trail]] = deque()
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Trail]]] = {}
        self._read_modules: set[tuple[int, frozenset[str]]] = set()
        self._modules: dict[int, tuple[types.ModuleType, Trail]] = {}

    def run(self, roots: Mapping[str, Any]) -> None:
        """Walks from the objects given, by the names that users know them by."""
        for name, value in roots.items():
            self.reach(value, Trail(name))
            self._empty()  # so that things are called after the first root that has them
        if self._executes(_READ_ENVIRONMENT):
            self._mapping(os.environ._data, Trail("os.environ"))  # type: ignore[attr-defined]
            del self.objects[id(os.environ._data)]  # type: ignore[attr-defined]
        self._empty()
        scanned: set[str] | None = None
        while scanned != self.module_names and not self._is_full():
            scanned = set(self.module_names)
            for module, trail in list(self._modules.values()):
                self._read_module(module, frozenset(scanned), trail)
            self._empty()
        for namespace, trails in self._globals.values():
            self.guards.keys(namespace, list(trails))
            self.places.append(places.Names(namespace, trails))

    def reach(self, value: Any, trail: Trail) -> None:
        """Has a value walked, if it has not been and can hold anything."""
        if type(value) not in CONSTANTS and id(value) not in self.seen:
            self.seen[id(value)] = value
            self._waiting.append((value, trail))

    def _executes(self, code: types.CodeType) -> bool:
        return self._codes is None or id(code) in self._codes

    def _empty(self) -> None:
        while self._waiting:
            if self._is_full():
                trail = self._waiting[0][1]
                self._waiting.clear()
                self.unwalkable.append((trail, f"more than {MOST_OBJECTS} objects"))
                return
            self._walk(*self._waiting.popleft())

    def _is_full(self) -> bool:
        return len(self.seen) > MOST_OBJECTS

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
        elif not is_constant_class(kind):
            self._object(value, trail)

    def _refuse(self, value: Any, trail: Trail, what: str | None = None) -> None:
        kind = type(value)
        self.unwalkable.append((trail, what or f"{kind.__module__}.{kind.__qualname__}"))

    # Objects with attributes

    def _object(self, value: Any, trail: Trail) -> None:
        kind = type(value)
        if is_own_class(kind):
            return
        base = base_of(kind)
        if base is None:
            self._refuse(value, trail)
            return
        self.objects[id(value)] = trail
        self._attributes(value, trail)
        for name, descriptor in slots_of(kind):
            if self._names is None or name in self._names:
                self._slot(value, descriptor, trail.attribute(name))
        if base is not object:
            _BASE_METHODS[base](self, value, trail)
        self._class(kind, Trail(kind.__qualname__))

    def _attributes(self, value: Any, trail: Trail) -> None:
        names, skipped = self._wanted_names(value), self._skip.get(id(value), frozenset())
        if skipped is None:
            return
        found = self.guards.attributes(value, names, skipped or None)
        self.places.append(places.Attributes(trail, value, found, names, skipped))
        for name, inner in found:
            if name in _REGISTRIES and type(inner) is dict:
                self._registry(inner, trail)
            else:
                self.reach(inner, trail.attribute(name))

    def _wanted_names(self, value: Any) -> frozenset[str] | None:
        if self._names is None or not is_a(value, (nn.Module, torch.optim.Optimizer)):
            return self._names
        return self._module_attributes if is_a(value, nn.Module) else self._names_of_optimizer

    @functools.cached_property
    def _module_attributes(self) -> frozenset[str]:
        return _MODULE_NAMES | (self._names or frozenset())

    @functools.cached_property
    def _names_of_optimizer(self) -> frozenset[str]:
        return _OPTIMIZER_NAMES | (self._names or frozenset())

    def _slot(self, value: Any, descriptor: Any, trail: Trail) -> None:
        found = self.guards.slot(value, descriptor)
        self.places.append(places.Slot(trail, value, descriptor, found))
        for inner in found:
            self.reach(inner, trail)

    def _registry(self, value: dict[str, Any], trail: Trail) -> None:
        """A module's parameters, buffers or modules: called as its attributes."""
        if id(value) not in self.seen:
            self.seen[id(value)] = value
            self._mapping(value, trail, dotted=True)

    # Containers

    def _mapping(self, value: dict[Any, Any], trail: Trail, dotted: bool = False) -> None:
        self.objects[id(value)] = trail
        skipped = self._skip.get(id(value), frozenset())
        if skipped is None:
            return
        found = self.guards.mapping(value, skipped or None)
        self.places.append(places.Mapping(trail, value, found, skipped, dotted))
        for key, inner in found:
            self.reach(key, trail)
            if type(inner) not in CONSTANTS:
                self.reach(inner, trail.attribute(key) if dotted else trail.item(key))

    def _default_dict(self, value: defaultdict[Any, Any], trail: Trail) -> None:
        factory: Any = defaultdict.default_factory
        self.reach(factory.__get__(value), trail.attribute("default_factory"))
        self._mapping(value, trail)

    def _items(self, value: Any, trail: Trail) -> None:
        base = next(base for base in places.ITEM_BASES if is_a(value, base))
        self.objects[id(value)] = trail
        if self._skip.get(id(value), ()) is None:
            return
        found = self.guards.items(value, base)
        self.places.append(places.Items(trail, value, base, found))
        self._reach_items(found, trail)

    def _fixed_items(self, value: Any, trail: Trail) -> None:
        base: Any = tuple if is_a(value, tuple) else frozenset
        self._reach_items(base.__iter__(value), trail)

    def _reach_items(self, found: Iterable[Any], trail: Trail) -> None:
        for index, inner in enumerate(found):
            if type(inner) not in CONSTANTS:
                self.reach(inner, trail.item(index))

    def _view(self, value: Any, trail: Trail) -> None:
        """A read-only view: of what it shows."""
        for inner in gc.get_referents(value):
            self.reach(inner, trail)

    # Functions

    def _function(self, value: types.FunctionType, trail: Trail) -> None:
        code = value.__code__
        for part in nested_codes(code):
            self.codes[id(part)] = part
        executed = self._executes(code)
        if is_trusted_code(code):
            if executed:
                self._trusted_function(value, trail)
            return
        self.guards.function(value)
        self.places.append(places.Function(trail, value))
        self._attributes(value, trail)
        if executed:
            self._defaults(value, trail)
            self._cells(value, guarded=True)
            self._globals_of(value)

    def _trusted_function(self, value: types.FunctionType, trail: Trail) -> None:
        """Its own state is none of the user's, but it may wrap what is, as decorators do."""
        self._cells(value, guarded=False)
        if keeps_switches(value.__code__.co_filename):
            self._globals_of(value)

    def _defaults(self, value: types.FunctionType, trail: Trail) -> None:
        where = _where(value.__code__)
        for inner in value.__defaults__ or ():
            self.reach(inner, Trail(f"a default of {where}"))
        if value.__kwdefaults__ is not None:
            self.reach(value.__kwdefaults__, Trail(f"the defaults of {where}"))

    def _cells(self, value: types.FunctionType, guarded: bool) -> None:
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            trail = Trail(f"closure variable {name!r} of {_where(value.__code__)}")
            if guarded:
                if id(cell) not in self.seen:
                    self.seen[id(cell)] = cell
                    self._cell(cell, trail)
            else:
                for inner in gc.get_referents(cell):
                    self.reach(inner, trail)

    def _cell(self, cell: types.CellType, trail: Trail) -> None:
        found = self.guards.cell(cell)
        self.places.append(places.Cell(trail, cell, found))
        for inner in found:
            self.reach(inner, trail)

    def _globals_of(self, function: types.FunctionType) -> None:
        code, namespace = function.__code__, function.__globals__
        found = code_names(code)
        trusted = is_trusted_code(code)
        if not trusted:
            self.module_names |= found.names
        for name in found.global_names:
            if name in namespace:
                trail = Trail(f"global {name!r} of {_where(code)}")
                self._named(namespace, name, trail)
                self._read(namespace[name], found.names, trail, trusted)
            elif not trusted:
                self._built_in(function, name)
        if found.imports and not trusted:
            self._imports(function, found.names)

    def _named(self, namespace: dict[str, Any], name: str, trail: Trail) -> None:
        self._globals.setdefault(id(namespace), (namespace, {}))[1].setdefault(name, trail)

    def _built_in(self, function: types.FunctionType, name: str) -> None:
        """A name that is no global, and must not become one."""
        trail = Trail(f"global {name!r} of {_where(function.__code__)}")
        self._named(function.__globals__, name, trail)
        built_in = function.__builtins__
        if name in built_in:
            trail = Trail(f"built-in {name!r}")
            self._named(built_in, name, trail)
            self._read(built_in[name], frozenset(), trail, trusted=True)

    def _imports(self, function: types.FunctionType, names: frozenset[str]) -> None:
        for code in nested_codes(function.__code__):
            for name, taken in imports_of(code, function.__globals__):
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    module = sys.modules.get(".".join(parts[:end]))
                    if module is not None:
                        self._read(module, names | {*taken}, Trail(".".join(parts[:end])), False)

    def _read(self, value: Any, names: frozenset[str], trail: Trail, trusted: bool) -> None:
        """A value that code with these names gets from a module."""
        if is_a(value, types.ModuleType):
            self._read_module(value, names, trail)
        elif trusted and type(value) in _SWITCHES:
            if id(value) not in self.seen:
                self.seen[id(value)] = value
                _METHODS[type(value)](self, value, trail)
                del self.objects[id(value)]  # everybody's, so that sharing it says nothing
        elif not trusted or is_foreign(value) or is_a(value, _READ_FURTHER):
            self.reach(value, trail)

    def _read_module(self, module: types.ModuleType, names: frozenset[str], trail: Trail) -> None:
        if (id(module), names) in self._read_modules:
            return
        self._read_modules.add((id(module), names))
        namespace = _C.instance_dict(module)
        trusted = is_trusted_name(namespace.get("__name__"))
        if trusted:
            self.libraries.add(str(namespace.get("__name__")))
        if not trusted:
            self._modules.setdefault(id(module), (module, trail))
            names = names | {"__getattr__"} | (self._names or frozenset())
        for name in names:
            if name in namespace:
                self._named(namespace, name, trail.attribute(name))
                value = namespace[name]
                if type(value) is types.BuiltinFunctionType:
                    self.built_ins[id(value)] = value, trail.attribute(name)
                if not trusted or is_a(value, _READ_IN_TRUSTED) or is_foreign(value):
                    self._read(value, names, trail.attribute(name), trusted)
            elif not trusted:
                self._named(namespace, name, trail.attribute(name))

    def _compiled(self, value: Any, trail: Trail) -> None:
        """A function compiled from Python: its calls are not seen by an observer."""
        module = getattr(value, "__module__", None)
        if not is_trusted_name(module) or str(module).startswith("numpy.random"):
            self._refuse(value, trail, "a compiled function")

    def _module(self, value: types.ModuleType, trail: Trail) -> None:
        self._read_module(value, frozenset(self.module_names), trail)

    def _bound(self, value: Any, trail: Trail) -> None:
        owner = value.__self__
        if type(owner).__name__ != "PyCapsule" and not isinstance(owner, types.ModuleType):
            self.reach(owner, trail.attribute("__self__"))

    def _method(self, value: types.MethodType, trail: Trail) -> None:
        self.reach(value.__func__, trail)
        self.reach(value.__self__, trail.attribute("__self__"))

    def _partial(self, value: functools.partial[Any], trail: Trail) -> None:
        self._attributes(value, trail)
        self.reach(value.func, trail.attribute("func"))
        self.reach(value.args, trail.attribute("args"))
        self.reach(value.keywords, trail.attribute("keywords"))

    def _wrapper(self, value: Any, trail: Trail) -> None:
        self.reach(value.__func__, trail)

    def _memo(self, value: Any, trail: Trail) -> None:
        """A cache of a function's results stands for the function."""
        self._attributes(value, trail)
        self.reach(value.__wrapped__, trail)

    def _property(self, value: property, trail: Trail) -> None:
        for function in (value.fget, value.fset, value.fdel):
            self.reach(function, trail)

    def _cached_property(self, value: functools.cached_property[Any], trail: Trail) -> None:
        self.reach(value.func, trail)

    # Classes

    def _class(self, kind: type, trail: Trail) -> None:
        for base in kind.__mro__:
            if id(base) not in self._classes:
                self._classes[id(base)] = base
                self._own_attributes(base)
        if type(kind) is not type and not is_trusted_class(type(kind)):
            self.reach(type(kind), Trail(type(kind).__qualname__))

    def _own_attributes(self, kind: type) -> None:
        if kind.__flags__ & _IMMUTABLE or is_own_class(kind):
            return
        skipped = self._skip.get(id(kind), frozenset())
        if skipped is None:
            return
        skipped = _CLASS_NOISE | skipped
        trail, trusted = Trail(kind.__qualname__), is_trusted_class(kind)
        found = self.guards.type(kind, self._names, skipped)
        watched = functools.partial(_is_watched, self._names, skipped)
        self.places.append(places.ClassAttributes(trail, kind, found, watched))
        for name, value in found:
            if not trusted or is_foreign(value) or is_a(value, types.FunctionType):
                self.reach(value, trail.attribute(name))

    # Tensors, arrays, and what tells its state when asked

    def _tensor(self, value: torch.Tensor, trail: Trail) -> None:
        kind = type(value)
        self.objects[id(value)] = trail
        if kind not in (torch.Tensor, nn.Parameter) and not issubclass(kind, nn.Buffer):
            self._refuse(value, trail)
            return
        if value.layout is torch.strided:
            self.objects.setdefault(value.untyped_storage()._cdata, trail)
        self.guards.tensor(value)
        self.places.append(places.Tensor(trail, value))
        self._attributes(value, trail)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(value, name):
                self.reach(hooks, trail.attribute(name))
        self._class(kind, Trail(kind.__qualname__))

    def _array(self, value: np.ndarray[Any, Any], trail: Trail) -> None:
        if value.nbytes > MOST_BYTES:
            self._refuse(value, trail, f"an array above {MOST_BYTES >> 20} MiB")
        elif value.dtype.hasobject:
            self._probe(value, probes.OBJECT_ARRAY, trail)
        elif value.flags.c_contiguous and value.dtype.kind in "biufc":
            self._memory(value, trail)
        else:
            self._probe(value, probes.STRIDED_ARRAY, trail)

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
        self.places.append(places.Probed(trail, value, state, probe.put_back))
        for inner in parts:
            self.reach(inner, trail)

    def _thread_local(self, value: Any, trail: Trail) -> None:
        if probes.THREAD_LOCAL.read(value):
            self._probe(value, probes.THREAD_LOCAL, trail)
        else:
            self._refuse(value, trail)

    def _reference(self, value: weakref.ref[Any], trail: Trail) -> None:
        self._probe(value, probes.PROBES[weakref.ref], trail)


def _where(code: types.CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _is_watched(names: frozenset[str] | None, skipped: Collection[str], name: str) -> bool:
    if name in skipped:
        return False
    return names is None or name in names or (name[:2] == name[-2:] == "__" and len(name) > 4)


#: What trusted code may have in its globals that others can set: torch's hooks for all modules.
_SWITCHES = (dict, list, set, OrderedDict)
_READ_FURTHER = (types.FunctionType, type)
#: What code gets from trusted modules and may hold something of the user's.
_READ_IN_TRUSTED = (types.ModuleType, types.FunctionType, type)

_METHODS: dict[type, Callable[[Walk, Any, Trail], None]] = {
    dict: Walk._mapping,
    OrderedDict: Walk._mapping,
    defaultdict: Walk._default_dict,
    **dict.fromkeys(places.ITEM_BASES, Walk._items),
    tuple: Walk._fixed_items,
    frozenset: Walk._fixed_items,
    **dict.fromkeys(
        (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())), Walk._view
    ),
    types.FunctionType: Walk._function,
    types.MethodType: Walk._method,
    types.BuiltinFunctionType: Walk._bound,
    types.MethodWrapperType: Walk._bound,
    functools.partial: Walk._partial,
    type(functools.lru_cache(len)): Walk._memo,
    staticmethod: Walk._wrapper,
    classmethod: Walk._wrapper,
    property: Walk._property,
    functools.cached_property: Walk._cached_property,
    types.CellType: Walk._cell,
    type: Walk._class,
    types.ModuleType: Walk._module,
    np.ndarray: Walk._array,
    **dict.fromkeys(MEMORIES, Walk._memory),
    threading.local: Walk._thread_local,
}

_BASE_METHODS: dict[Any, Callable[[Walk, Any, Trail], None]] = {
    dict: Walk._mapping,
    defaultdict: Walk._default_dict,
    **dict.fromkeys(places.ITEM_BASES, Walk._items),
    tuple: Walk._fixed_items,
    frozenset: Walk._fixed_items,
    weakref.ref: Walk._reference,
    functools.partial: Walk._partial,
    property: Walk._property,
    staticmethod: Walk._wrapper,
    classmethod: Walk._wrapper,
    functools.cached_property: Walk._cached_property,
}
