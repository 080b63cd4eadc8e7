"""The part of a walk that goes through code: functions, the modules they read, and classes."""

from __future__ import annotations

import decimal
import functools
import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from waterflow.account import places
from waterflow.account.bytecode import imports_of, nested_codes, variables_set_by
from waterflow.account.class_parts import (
    CLASS_NOISE,
    CONSTANTS,
    is_a,
    is_behind_function,
    is_foreign,
)
from waterflow.account.code_names import code_names, reads_by_name
from waterflow.account.library import LibraryPart, is_as_first_met
from waterflow.account.places import Trail
from waterflow.account.trust import (
    Packages,
    is_everybodys,
    is_own_class,
    is_trusted_class,
    is_trusted_code,
    is_trusted_name,
    keeps_switches,
)
from waterflow.allocator_ext import _C

_IMMUTABLE = 1 << 8  # a flag of classes whose attributes nobody can set
#: One for all, as there are hundreds in an account.
_NOTHING = frozenset[Any]()
#: What says nothing, unless code names it, or, of texts, may read them by any name.
_TEXTS = frozenset({"__doc__", "__module__"})
_READABLE_NOISE = _TEXTS | {"__annotations__"}
#: Names by which code reads what a function has.
READ_DEFAULTS = frozenset({"__defaults__", "__kwdefaults__", "signature", "getfullargspec"})
READ_CELLS = frozenset({"__closure__", "getclosurevars"})
READ_GLOBALS = frozenset({"__globals__", "getclosurevars"})
#: Names by which code reads annotations of functions.
_READ_ANNOTATIONS = frozenset(
    {"__annotations__", "get_annotations", "get_type_hints", "signature", "getfullargspec"}
)
#: What says nothing of a class in which torch counts the hooks that there ever were.
_NOISE_OF = {id(RemovableHandle): CLASS_NOISE | {"next_id"}}
#: What trusted code may have in its globals that others can set: torch's hooks for all modules.
_SWITCHES = (dict, list, set, OrderedDict)
_READ_FURTHER = (types.FunctionType, type)
#: What code gets from trusted modules and may hold something of the user's.
_READ_IN_TRUSTED = (types.ModuleType, types.FunctionType, type, *_SWITCHES)
#: But for what imports change, which lead to all modules there are.
_OF_IMPORTS = sys.modules, sys.path_importer_cache, sys.meta_path, sys.path_hooks
Skipped = Mapping[int, Collection[Any] | None]
#: A function or class of the library's, or a module with the names that are read in it.
Entry = tuple[Any, frozenset[str]]


class Late(NamedTuple):
    """What a walk comes to last, when all is known that is reached by another way.

    Attributes:
        roots: the names of roots that are walked then.
        objects: identities of objects that are put aside until then.
        skip: as of the walk, for what nothing else leads to.
    """

    roots: Collection[str] = ()
    objects: Collection[int] = ()
    skip: Mapping[int, Collection[Any]] = {}


NOTHING_LATE = Late()


class CodeWalk:
    """What a walk has found, and how it goes through code; `Walk` goes through objects."""

    #: The packages whose code it goes through.
    packages = Packages.ALL
    #: What the library's code leads to, as far as that was walked apart.
    library: LibraryPart | None = None
    #: Whether it is.
    leaves_library = True

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
        #: Built-in functions that code names, by identity.
        self.built_ins: dict[int, types.BuiltinFunctionType] = {}
        #: Names of what the code that is passed by may call of the user's.
        self.handed_names: set[str] = set()
        #: Names of the trusted modules that code names.
        self.libraries: set[str] = set()
        #: Libraries whose settings decide what comes of values and classes that were met.
        self.governed: set[str] = set()
        #: Containers that were met and not looked into, as they have too many items.
        self.large: list[Any] = []
        #: Whether somebody holds what reads attributes by names given to it, by whatever name.
        self.holds_reader = False
        #: Objects that can change, by identity, and how they were reached.
        self.objects: dict[int, Trail] = {}
        #: Names by which modules are read, as far as functions were met.
        self.module_names: set[str] = set()
        #: The attributes that count; None: any.
        self.names = None if names is None else frozenset(names)
        #: Names that count of every module that is not the library's.
        self._of_modules = frozenset({"__getattr__"}) | (self.names or frozenset())
        self._codes = None if codes is None else {id(code): code for code in codes}
        self._skip = {holder: None if k is None else frozenset(k) for holder, k in skip.items()}
        self.seen: dict[int, Any] = {}
        self._aside: Collection[int] = ()  # what is walked late
        self._put_aside: list[tuple[Any, Trail]] = []  # what was met of that
        self.classes: dict[int, type] = {}
        self._waiting: deque[tuple[Any, Trail]] = deque()
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Trail]]] = {}
        self._read_modules: dict[tuple[int, frozenset[str]], dict[str, Any]] = {}
        #: Where it would go into the library: a function, a class, or names of a module.
        self._entries: dict[Any, Entry] = {}
        self._left = 0  # so many of them are walked apart
        self._librarys: list[types.FunctionType] = []  # functions met
        self.functions = 0  # met that are not the library's
        self._modules: dict[int, tuple[types.ModuleType, Trail]] = {}

    def reach(self, value: Any, trail: Trail) -> None:
        """Has a value walked, if it has not been and can hold anything."""
        if id(value) in self._aside:
            self._put_aside.append((value, trail))
        elif type(value) not in CONSTANTS and id(value) not in self.seen:
            self.seen[id(value)] = value
            self._waiting.append((value, trail))

    def _skipped(self, value: Any) -> frozenset[Any] | None:
        """What of an object's attributes or keys does not count; None: none of them does."""
        return self._skip.get(id(value), _NOTHING)

    def passes_by(self, kind: type) -> bool:
        """Whether the code of a class is not to be looked into."""
        return kind is not object and self.packages.passes_name(kind.__dict__.get("__module__"))

    def executes(self, code: types.CodeType) -> bool:
        """Whether a function of this code is to be looked into."""
        return self._codes is None or id(code) in self._codes

    def _refuse(self, value: Any, trail: Trail, what: str | None = None) -> None:
        kind = type(value)
        self.unwalkable.append((trail, what or f"{kind.__module__}.{kind.__qualname__}"))

    # What `Walk` has for objects

    def _attributes(self, value: Any, trail: Trail) -> None:
        raise NotImplementedError

    def _switch(self, value: Any, trail: Trail) -> None:
        raise NotImplementedError

    # Functions

    def _function(self, value: types.FunctionType, trail: Trail) -> None:
        code = value.__code__
        if self.packages.passes_file(code.co_filename):
            self._cells(value, guarded=False)  # it may wrap what is the user's
            return
        trusted = is_trusted_code(code) and is_as_first_met(value)
        if trusted and not value.__closure__ and self._enters(value):
            return
        for part in nested_codes(code):
            self.codes[id(part)] = part
        executed = self.executes(code)
        if trusted:
            if executed:
                self._trusted_function(value)
            return
        self.functions += 1
        self.guards.function(value)
        self.places.append(places.Function(trail, value))
        self._attributes(value, trail)
        if self.names is not None and not _READ_ANNOTATIONS.isdisjoint(self.names):
            self.reach(value.__annotations__, trail.attribute("__annotations__"))
        # Executed code may read what a function has, be it that it does not call it.
        names = self._names_of_users
        if executed or not READ_DEFAULTS.isdisjoint(names):
            self._defaults(value, trail)
        if executed or not READ_CELLS.isdisjoint(names):
            self._cells(value, guarded=True)
        if executed or not READ_GLOBALS.isdisjoint(names):
            self._globals_of(value)

    @functools.cached_property
    def _names_of_users(self) -> frozenset[str]:
        """What executed code of the user's names."""
        codes = (self._codes or {}).values()
        users = [code_names(code).names for code in codes if not is_trusted_code(code)]
        return frozenset[str]().union(*users)

    def _note_reader(self, value: Any) -> None:
        """The library's own tables have them, too, and read nothing of the user's by them."""
        if self.leaves_library:
            self.holds_reader = self.holds_reader or reads_by_name(value)

    def _enters(self, value: types.FunctionType | type) -> bool:
        """Whether a function or class of the library's is left to the walk along that."""
        self._note_reader(value)
        if self.leaves_library and is_everybodys(value):
            self._entries[id(value)] = value, _NOTHING
            return True
        return False

    def _trusted_function(self, value: types.FunctionType) -> None:
        """Its own state is none of the user's, but it may wrap what is, as decorators do."""
        self._librarys.append(value)
        self._cells(value, guarded=False)
        if keeps_switches(value.__code__.co_filename):
            self._globals_of(value)
        elif self._codes is not None:
            self._settings_of(value)

    def _settings_of(self, value: types.FunctionType) -> None:
        """What a function of the library's that runs reads of its module's plain variables, some of
        which users set, as `tempfile.tempdir`."""
        namespace = value.__globals__
        for name in sorted(code_names(value.__code__).global_names & namespace.keys()):
            found = namespace[name]
            if type(found) in CONSTANTS:
                self._named(namespace, name, Trail(f"global {name!r} of {_where(value.__code__)}"))
            elif type(found) is types.FunctionType and found.__globals__ is namespace:
                self.reach(found, Trail(name))

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
            # What the library's sets itself goes with what else it keeps (`singledispatch` tells
            # by a number that what it remembers is outdated): both are put back, or none.
            if guarded or name in variables_set_by(value.__code__):
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
        for name in sorted(found.global_names):  # in one order in every process
            if name in namespace:
                trail = Trail(f"global {name!r} of {_where(code)}")
                self._named(namespace, name, trail)
                self._read(namespace[name], found.names, trail, trusted)
                if not trusted:
                    self._note_use(namespace[name], found.names)
            elif not trusted:
                self._built_in(function, name)
        if found.imports and not trusted:
            self._imports(function, found.names)

    def _named(self, namespace: dict[str, Any], name: str, trail: Trail) -> None:
        self._trails_of(namespace).setdefault(name, trail)

    def _trails_of(self, namespace: dict[str, Any]) -> dict[str, Trail]:
        return self._globals.setdefault(id(namespace), (namespace, {}))[1]

    def _built_in(self, function: types.FunctionType, name: str) -> None:
        """A name that is no global, and must not become one."""
        trail = Trail(f"global {name!r} of {_where(function.__code__)}")
        self._named(function.__globals__, name, trail)
        built_in: dict[str, Any] = function.__builtins__  # type: ignore[attr-defined]
        if name in built_in:
            trail = Trail(f"built-in {name!r}")
            self._named(built_in, name, trail)
            self._read(built_in[name], frozenset(), trail, trusted=True)
            self._note_use(built_in[name], frozenset())

    def _note_use(self, value: Any, names: frozenset[str]) -> None:
        """What of other people's code the user's code names: `purity.may_touch_the_world`."""
        if type(value) is types.BuiltinFunctionType:
            self.built_ins[id(value)] = value
        elif is_a(value, types.ModuleType):
            namespace = _C.instance_dict(value) or {}
            if is_trusted_name(namespace.get("__name__")):
                self.libraries.add(str(namespace["__name__"]))
            for name in names & namespace.keys():
                if type(namespace[name]) is types.BuiltinFunctionType:
                    self.built_ins[id(namespace[name])] = namespace[name]

    def _imports(self, function: types.FunctionType, names: frozenset[str]) -> None:
        for code in nested_codes(function.__code__):
            for name, taken in imports_of(code, function.__globals__):
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    module = sys.modules.get(".".join(parts[:end]))
                    if module is not None:
                        self._note_use(module, names | {*taken})
                        if not is_trusted_name(".".join(parts[:end])):
                            self._named(sys.modules, ".".join(parts[:end]), Trail(f"module {name}"))
                        self._read(module, names | {*taken}, Trail(".".join(parts[:end])), False)

    def _read(self, value: Any, names: frozenset[str], trail: Trail, trusted: bool) -> None:
        """A value that code with these names gets from a module."""
        if is_a(value, types.ModuleType):
            self._read_module(value, names, trail)
        elif trusted and type(value) in _SWITCHES:
            if not any(value is one for one in _OF_IMPORTS):
                self._switch(value, trail)
        elif not trusted or is_foreign(value) or is_a(value, _READ_FURTHER):
            self.reach(value, trail)

    def _read_module(self, module: types.ModuleType, names: frozenset[str], trail: Trail) -> None:
        if (id(module), names) in self._read_modules:
            return
        namespace = _C.instance_dict(module) or {}
        self._read_modules[id(module), names] = namespace
        called: Any = namespace.get("__name__")
        if self.packages.passes_name(called):
            return
        trusted = is_trusted_name(called)
        if trusted and self.leaves_library and sys.modules.get(called) is module:
            self._entries[id(module), names] = module, names
            return
        if not trusted:
            self._modules.setdefault(id(module), (module, trail))
            wide = self._of_modules if names <= self._of_modules else names | self._of_modules
            if wide != names:
                if (id(module), wide) in self._read_modules:
                    return
                self._read_modules[id(module), wide] = namespace
            names = wide
        for name in sorted(names & namespace.keys()):
            self._named(namespace, name, trail.attribute(name))
            value = namespace[name]
            if not trusted or is_a(value, _READ_IN_TRUSTED) or is_foreign(value):
                self._read(value, names, trail.attribute(name), trusted)
        if not trusted:
            known, within = self._trails_of(namespace), places.Within(trail)
            for name in names.difference(namespace, known):
                known[name] = within

    def _compiled(self, value: Any, trail: Trail) -> None:
        """A function compiled from Python: its calls are not seen by an observer."""
        module = getattr(value, "__module__", None)
        if not is_trusted_name(module) or str(module).startswith("numpy.random"):
            self._refuse(value, trail, "a compiled function")

    def _module(self, value: types.ModuleType, trail: Trail) -> None:
        self._read_module(value, frozenset(self.module_names), trail)

    def _bound(self, value: Any, trail: Trail) -> None:
        self._note_reader(value)
        owner = value.__self__
        if not (is_behind_function(owner) or is_a(owner, types.ModuleType)):
            self.reach(owner, trail.attribute("__self__"))

    def _method(self, value: types.MethodType, trail: Trail) -> None:
        self.reach(value.__func__, trail)
        self.reach(value.__self__, trail.attribute("__self__"))

    def _slot(self, value: Any, descriptor: Any, trail: Trail) -> None:
        found = self.guards.slot(value, descriptor)
        self.places.append(places.Slot(trail, value, descriptor, found))
        for inner in found:
            self.reach(inner, trail)

    def _partial(self, value: functools.partial[Any], trail: Trail) -> None:
        self._attributes(value, trail)
        for name in ("func", "args", "keywords"):  # `__setstate__` gives it others
            self._slot(value, vars(functools.partial)[name], trail.attribute(name))

    def _dispatched(self, value: functools.singledispatchmethod[Any], trail: Trail) -> None:
        self._attributes(value, trail)
        self.reach(value.func, trail)
        self.reach(value.dispatcher.registry, trail)

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
            if id(base) not in self.classes:
                self.classes[id(base)] = base
                if base is decimal.Decimal:
                    self.governed.add("decimal")
                if base.__flags__ & _IMMUTABLE or is_own_class(base) or self.passes_by(base):
                    continue
                if not (is_trusted_class(base) and self._enters(base)):
                    self._own_attributes(base)
        if type(kind) is not type and not is_trusted_class(type(kind)):
            self.reach(type(kind), Trail(type(kind).__qualname__))

    def _own_attributes(self, kind: type) -> None:
        skipped = self._skipped(kind)
        if skipped is None:
            return
        noise = _NOISE_OF.get(id(kind), CLASS_NOISE)
        trail, trusted = Trail(kind.__qualname__), is_trusted_class(kind)
        if not trusted:
            noise -= _TEXTS if self.names is None else self.names & _READABLE_NOISE
        skipped = noise | skipped if skipped else noise
        found = self.guards.type(kind, self.names, skipped)
        watched = functools.partial(_is_watched, self.names, skipped)
        self.places.append(places.ClassAttributes(trail, kind, found, watched))
        for name, value in found:
            if not trusted or is_foreign(value) or is_a(value, types.FunctionType):
                self.reach(value, trail.attribute(name))


def _where(code: types.CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _is_watched(names: frozenset[str] | None, skipped: Collection[str], name: str) -> bool:
    if name in skipped:
        return False
    return names is None or name in names or (name[:2] == name[-2:] == "__" and len(name) > 4)
