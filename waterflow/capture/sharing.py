"""Whether two jobs have a Python object in common that one of them may change while it trains: a
metric that each evaluation resets, a hook's or a criterion's notes, a buffer of a collate function.

What each would find there depends on who comes when, so such jobs train one after another, as in
the plain loop. What callbacks change and only callbacks see is theirs: that is how trials are
compared.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from waterflow.account import places
from waterflow.account.account import Account
from waterflow.account.bytecode import nested_codes
from waterflow.account.class_parts import is_a, slots_of
from waterflow.account.code_names import code_names
from waterflow.account.purity import undisturbed
from waterflow.account.stores import Change, Origin, stores_of
from waterflow.account.trust import (
    is_of_trusted_classes,
    is_own_class,
    is_trusted_class,
    is_trusted_code,
)
from waterflow.capture.python_kind import kind_of_python
from waterflow.common.environment import is_library_file
from waterflow.job.epochs import NumberedEpochs
from waterflow.job.job import Job
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.several import optimizers_in

#: Jobs that reach more objects, and so many for each of their modules, are not told apart: with
#: large libraries among them a walk takes seconds.
_MOST_OBJECTS, _OF_A_MODULE = 3_000, 50
#: So far, and so many objects, is looked into containers.
_DEPTH, _MOST_CONTENTS = 4, 10_000
#: For so many kinds of jobs it is remembered whether they change anything.
_MOST_KINDS = 256
_KNOWN: dict[Hashable, _Known] = {}
#: Kinds of jobs, by the code or class of their functions alone, that reach too much.
_TOO_LARGE: set[Hashable] = set()
#: Python that steps run, by the names of a job's arguments; `on_step` is looked at beside it.
_STEPS = ("loss", "step", "evaluate", "scheduler")
#: Parameters of a job's functions that are its own objects, by their positions.
_GIVEN = {"loss": ("model", "batch"), "step": ("batch",), "evaluate": ("model",), "on_step": ("",)}
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MEMORIES = (torch.Tensor, np.ndarray)
#: Methods by which arrays are changed that other objects have, too.
_OF_ARRAYS = frozenset({"fill", "put", "sort", "partition", "byteswap", "resize", "setflags"})
#: Methods of an object that nobody else has yet.
_MAKERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
_SWITCH_MODES = frozenset({"eval", "train"})


class _Known(NamedTuple):
    """What is known of jobs of one kind.

    Attributes:
        changes: whether their Python changes anything that it has not made.
        functions: those that it calls by name, where these are held and by which name.
    """

    changes: bool
    functions: list[tuple[Any, str, Any]]

    def holds(self) -> bool:
        """Whether they are still called by those names."""
        return all(held.get(name) is value for held, name, value in self.functions)


class Sharing:
    """What one job may have in common with others."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def reason(self, other: Sharing) -> str | None:
        """Why the two may not train side by side: what one of them may change; None: they may."""
        module = self._common_mode(other)
        if module is not None:
            return module
        if not (self._changes_anything or other._changes_anything):
            return None
        one, two = self._reach, other._reach
        if one is None or two is None:  # more than can be looked at
            return None
        return one.may_change(two) or two.may_change(one)

    @functools.cached_property
    def _roots(self) -> dict[str, Any]:
        job = self._job
        data = None if _is_plain(job.data) else job.data
        if type(data) is DataLoader and data.num_workers:  # which work on copies of all else
            samplers = data.sampler, data.batch_sampler
            data = [one for one in samplers if not is_of_trusted_classes(one)]
        roots = {name: getattr(job, name) for name in _STEPS}
        optimizers = [one for one in optimizers_in(job.optimizer) if _has_users_code(one)]
        return {"model": job.root, **roots, "data": data, "optimizer": optimizers}

    @functools.cached_property
    def _changes_anything(self) -> bool:
        """Whether its Python may change anything that is not made by it; one look for all jobs that
        are made of the same functions and classes, as long as these call the same."""
        kind = kind_of_python({**self._roots, "on_step": self._job.on_step})
        known = _KNOWN.get(kind)
        if known is not None and known.holds():
            return known.changes
        reach = self._reach
        if reach is None:
            return False
        if kind is not None:
            if len(_KNOWN) >= _MOST_KINDS:
                _KNOWN.clear()
            _KNOWN[kind] = _Known(reach.changes_anything, reach.functions_by_name())
        return reach.changes_anything

    @functools.cached_property
    def _reach(self) -> Reach | None:
        kind = tuple(_code_of(root) or type(root) for root in self._roots.values())
        if kind in _TOO_LARGE:
            return None
        most = _MOST_OBJECTS + _OF_A_MODULE * len(self._modules)
        steps = _account_of(self._roots, most)
        callback = _account_of({"on_step": self._job.on_step}, most)
        if steps is None or callback is None:
            if len(_TOO_LARGE) < _MOST_KINDS:
                _TOO_LARGE.add(kind)
            return None
        return Reach(self._job, steps, callback)

    @functools.cached_property
    def _modules(self) -> dict[int, nn.Module]:
        return {id(module): module for module in self._job.root.modules()}

    def _common_mode(self, other: Sharing) -> str | None:
        """A module of both whose mode counts, where one of the two may switch it: an evaluation
        that makes it draw no dropout would do so in the other's steps."""
        common = self._modules.keys() & other._modules.keys()
        counts = [one for key in common if _mode_counts(one := self._modules[key])]
        if not counts or not (self._switches_modes or other._switches_modes):
            return None
        return f"the mode (training or not) of a {type(counts[0]).__name__} that both have"

    @property
    def _switches_modes(self) -> bool:
        job = self._job
        functions = (job.loss, job.step, job.on_step)
        codes = [code for one in functions if (code := _code_of(one)) is not None]
        named = frozenset[str]().union(*(code_names(code).names for code in codes))
        return job.evaluate is not None or not named.isdisjoint(_SWITCH_MODES)


def _account_of(roots: Mapping[str, Any], most: int) -> Account | None:
    try:
        with undisturbed():
            found = Account.take(roots, executed_only=True, most=most)
    except Exception:  # objects that refuse to be looked at, or change meanwhile
        return None
    return found if found.is_whole else None


def _has_users_code(optimizer: torch.optim.Optimizer) -> bool:
    own = vars(optimizer)
    hooks = any(value for name, value in own.items() if "hooks" in name)
    return hooks or "step" in own or not is_of_trusted_classes(optimizer)


def _is_plain(data: Any) -> bool:
    """Whether none of a job's Python makes its batches, but what is its own, or everybody's."""
    return type(data) in (list, tuple) or isinstance(data, NumberedEpochs)


def _mode_counts(module: nn.Module) -> bool:
    """Whether a module in training mode does something else than in the other."""
    if not module.training or getattr(module, "dropout", None) == 0:
        return False
    code = _code_of(type(module).forward)
    return code is None or "training" in code_names(code).names


def _code_of(function: Any) -> CodeType | None:
    function = getattr(function, "__func__", function)
    return function.__code__ if type(function) is FunctionType else None


class _Way(NamedTuple):
    """How something is changed, as of a `Change`; `code`: whose variable it is."""

    how: str
    name: str
    code: CodeType | None


class Reach:
    """What a job's Python reaches, and what of that it may change.

    Attributes:
        steps: what its steps, evaluations and data reach.
    """

    def __init__(self, job: Job, steps: Account, callback: Account) -> None:
        """Takes what its steps reach, and its callback."""
        self._job = job
        self.steps = steps
        self._accounts = steps, callback
        codes = {code: None for account in self._accounts for code in account.own_codes}
        found = [stores_of(code) for code in codes if not _is_known(code)]
        changes = [change for stores in found for change in stores.changes]
        iterates = any(map(_is_iterator, self._objects))
        self._changes = [
            change
            for change in changes
            if not (_is_of_tensors(change) or _is_of_its_maker(change))
            and (iterates or change.name != "__next__")
        ]
        self._escapes = frozenset[Origin]().union(*(stores.escapes for stores in found))
        self._aliases = _together(stores.aliases for stores in found)
        self._contents = _together(stores.contents for stores in found)

    @property
    def changes_anything(self) -> bool:
        """Whether there is anything that is not made by its own code and may be changed by it."""
        return bool(self._changes or self._optimizers)

    def may_change(self, other: Reach) -> str | None:
        """What it may change that the other's steps reach, in words; None: nothing."""
        for key, (where, value) in self._changed.items():
            if key in other._reached:
                return f"{other._name(key, value)}, which {where} may change"
        return None

    @functools.cached_property
    def _changed(self) -> dict[Hashable, tuple[str, Any]]:
        """What it may change, by identities, and where; with the objects, so that nobody else has
        these."""
        found: dict[Hashable, tuple[str, Any]] = {}
        for origin, ways in self._ways.items():
            for key, way, value in self._changed_at(origin, ways):
                found.setdefault(key, (ways[way], value))
        for optimizer in self._optimizers:
            for parameter in trained_parameters(optimizer):
                for key in (id(parameter), *_memory_of(parameter)):
                    found.setdefault(key, (f"a {type(optimizer).__name__}", parameter))
        return found

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that its Python may step, beside its own."""
        kind = torch.optim.Optimizer
        return [one for account in self._accounts for one in account.instances(kind)]

    @functools.cached_property
    def _ways(self) -> dict[Origin | None, dict[_Way, str]]:
        """How what comes from where is changed, and by which line; None: from nowhere."""
        found: dict[Origin | None, dict[_Way, str]] = {}
        for change in self._changes:
            code = change.code
            where = f"{code.co_qualname} ({code.co_filename}:{change.line})"
            of_variable = change.how in ("variable", "cell")
            way = _Way(change.how, change.name, code if of_variable else None)
            for origin in (None,) if of_variable else change.origins:
                found.setdefault(origin, {}).setdefault(way, where)
        return found

    def _changed_at(
        self, origin: Origin | None, ways: Iterable[_Way]
    ) -> Iterator[tuple[Hashable, _Way, Any]]:
        if origin is None:
            for way in ways:
                yield from ((key, way, value) for key, value in self._variables(way))
            return
        for known in self._known_by([origin]):
            yield from self._changed_there(known, ways)

    def _changed_there(
        self, origin: Origin, ways: Iterable[_Way]
    ) -> Iterator[tuple[Hashable, _Way, Any]]:
        by_kind: dict[type, list[Any]] = {}
        for value in self._objects_of(origin):
            by_kind.setdefault(type(value), []).append(value)
        for kind, values in by_kind.items():
            for way in ways:
                if is_a(values[0], ModuleType):
                    named = way.how == "attribute"
                    found = [v for m in values if named for v in _variables(vars(m), way.name)]
                    yield from ((key, way, value) for key, value in found)
                elif _may_be_changed(kind, way, origin):
                    for value in values:
                        if not _is_looked_after(value):
                            yield id(value), way, value
                            yield from ((memory, way, value) for memory in _memory_of(value))

    def _variables(self, way: _Way) -> Iterator[tuple[Hashable, Any]]:
        assert way.code is not None
        for function in self._functions.get(way.code, ()):
            if way.how == "variable":
                yield from _variables(function.__globals__, way.name)
            else:
                yield from ((id(c), c) for name, c in _cells(function) if name == way.name)

    @functools.cached_property
    def _reached(self) -> frozenset[Hashable]:
        """What its steps, evaluations and data reach, by identities."""
        found: set[Hashable] = {*self.steps.identities, *self._batches}
        for place in self.steps.own_places:
            if isinstance(place, places.Names):
                found.update((id(place.namespace), name) for name in place.trails)
        for array in self.steps.instances(np.ndarray):
            found.update(_memory_of(array))
        return frozenset(found)

    def _name(self, key: Hashable, value: Any) -> str:
        """What it calls something that it reaches."""
        for place in self.steps.own_places:
            if isinstance(key, tuple):
                if isinstance(place, places.Names) and id(place.namespace) == key[0]:
                    return place.text(key[1])
            elif isinstance(place, places.Cell) and place.cell is value:
                return str(place.trail)
        if key in self._batches:
            return f"a {type(value).__name__} among the batches"
        named = value.__qualname__ if is_a(value, (type, FunctionType)) else type(value).__name__
        return self.steps.trail_of(value) or named

    @functools.cached_property
    def _batches(self) -> dict[int, Any]:
        """What can change in data that are a list of batches, but for tensors."""
        plain = type(self._job.data) in (list, tuple)
        found = _within([self._job.data]) if plain else ()
        return {id(value): value for value in found if not is_a(value, torch.Tensor)}

    def functions_by_name(self) -> list[tuple[Any, str, Any]]:
        """The functions and classes that its code calls by names of modules and classes."""
        found: list[tuple[Any, str, Any]] = []
        for place in (place for account in self._accounts for place in account.own_places):
            if isinstance(place, places.Names):
                found += _called(place.namespace, place.before)
            elif isinstance(place, places.ClassAttributes):
                found += _called(vars(place.kind), place.before)
        return found

    # Where values come from

    def _objects_of(self, origin: Origin) -> Iterable[Any]:
        """The objects that a value may be, as far as they are not made by the job's code."""
        if origin.kind == "held":
            return self._held(origin.name)
        if origin.kind == "below":
            return _within(self._held(origin.name), themselves=False)
        if origin.kind == "class":
            return self._own_classes
        return self._given(origin) if origin.kind == "parameter" else self._escaped

    def _known_by(self, origins: Iterable[Origin]) -> Iterable[Origin]:
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
                waiting += map(_below, stored)
                waiting += self._contents.get(origin.name, ())
        return found

    @functools.cached_property
    def _escaped(self) -> list[Any]:
        """What anybody's code may have been handed, but for tensors."""
        found: dict[int, Any] = {}
        for origin in self._known_by(self._escapes):
            if origin.kind in ("held", "below"):
                held = self._plainly_held(origin.name)
                for value in _within(held, themselves=origin.kind == "held"):
                    found[id(value)] = value
        return [value for value in found.values() if not is_a(value, torch.Tensor)]

    def _held(self, name: str) -> Iterator[Any]:
        """What is held by a name now, or was found by code that computes it."""
        yield from self._plainly_held(name)
        if name in self._computed:
            yield from self._escaped

    def _plainly_held(self, name: str) -> Iterator[Any]:
        """By objects, classes, modules, variables of functions."""
        yield from self._by_name.get(name, ())
        for namespace in self._namespaces:
            if name in namespace:
                yield namespace[name]

    @functools.cached_property
    def _namespaces(self) -> list[dict[str, Any]]:
        found = [p for a in self._accounts for p in a.own_places if isinstance(p, places.Names)]
        return list({id(place.namespace): place.namespace for place in found}.values())

    @functools.cached_property
    def _objects(self) -> list[Any]:
        return [value for account in self._accounts for value in account.own_objects]

    @functools.cached_property
    def _own_classes(self) -> list[type]:
        found = {id(kind): kind for account in self._accounts for kind in account.own_classes}
        return [kind for kind in found.values() if not is_trusted_class(kind)]

    @functools.cached_property
    def _computed(self) -> frozenset[str]:
        """Attributes that are computed, by properties and their like."""
        plain = (FunctionType, staticmethod, classmethod, *_CONTAINERS, *_MEMORIES)
        return frozenset(
            name
            for kind in self._own_classes
            for name, value in vars(kind).items()
            if hasattr(type(value), "__get__") and not is_a(value, plain)
        )

    @functools.cached_property
    def _by_name(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for value in self._objects:
            for name, held in _attributes(value):
                found.setdefault(name, []).append(held)
        for kind in self._own_classes:
            for name, held in vars(kind).items():
                found.setdefault(name, []).append(held)
        return found

    @functools.cached_property
    def _functions(self) -> dict[CodeType, list[FunctionType]]:
        """The functions of each code, or around it."""
        found: dict[CodeType, list[FunctionType]] = {}
        for value in self._objects:
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
                for function in _functions_of(value):
                    found.setdefault(function.__code__, []).append(kind)
        return found

    def _given(self, origin: Origin) -> Iterator[Any]:
        """What a parameter may be."""
        code = origin.code
        assert code is not None
        for function in self._functions.get(code, ()):
            yield from _defaults(function, origin.name)
        place = code.co_varnames.index(origin.name)
        owners = self._owners.get(code, [])
        if owners and place == 0:
            if origin.name == "cls":
                yield from owners
            elif code.co_name not in _MAKERS:
                kinds = tuple(owners)
                yield from (value for value in self._objects if is_a(value, kinds))
            return
        for given in self._given_by_engine(code, place - bool(owners)):
            yield from given
            return
        yield from self._escaped

    def _given_by_engine(self, code: CodeType, place: int) -> Iterator[list[Any]]:
        """What the job's own functions are given."""
        for name, given in _GIVEN.items():
            function = getattr(self._job, name)
            if _code_of(function) is not code or not 0 <= place < len(given):
                continue
            if given[place] == "batch":
                plain = type(self._job.data) in (list, tuple)
                held = _within([self._job.data], themselves=False)
                batches = held if plain else self._escaped
                yield [value for value in batches if not is_a(value, torch.Tensor)]
            else:
                yield [self._job.root] if given[place] == "model" else []


def _called(held: Mapping[str, Any], names: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    kinds = (type, FunctionType)
    return [(held, name, value) for name, value in names.items() if is_a(value, kinds)]


def _together(
    found: Iterable[Mapping[str, frozenset[Origin]]],
) -> dict[str, frozenset[Origin]]:
    together: dict[str, frozenset[Origin]] = {}
    for each in found:
        for name, origins in each.items():
            together[name] = together.get(name, frozenset()) | origins
    return together


def _below(origin: Origin) -> Origin:
    return origin._replace(kind="below") if origin.kind == "held" else origin


def _is_of_tensors(change: Change) -> bool:
    """Whether only tensors can be changed in this way, and these come from nowhere known: batches
    and what is made of them."""
    kinds = {origin.kind for origin in change.origins}
    in_place = change.name.endswith("_") and not change.name.startswith("_")
    named = change.how == "method" and (in_place or change.name == "out")
    return named and kinds <= {"parameter", "unknown"}


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _is_known(code: CodeType) -> bool:
    """Whether code is the library's, or what the standard library writes for data classes."""
    of_data_class = code.co_qualname.startswith("__create_fn__.<locals>.")
    return is_trusted_code(code) or (of_data_class and code.co_filename == "<string>")


def _is_of_its_maker(change: Change) -> bool:
    """Whether a method that makes an object changes that, or what it was given for it."""
    kinds = {origin.kind for origin in change.origins}
    return change.code.co_name in _MAKERS and bool(kinds) and kinds <= {"parameter", "unknown"}


def _may_be_changed(kind: type, way: _Way, origin: Origin) -> bool:
    """Whether objects of a class can be changed in this way."""
    if issubclass(kind, _MEMORIES):
        if issubclass(kind, torch.Tensor) and origin.kind not in ("held", "below"):
            return False  # of batches: `data_memory`
        arrays = issubclass(kind, np.ndarray) and way.name in _OF_ARRAYS
        named = way.name.endswith("_") or way.name == "out" or arrays
        return way.how in ("item", "operator", "attribute") or named
    if way.name in ("out", "generator"):
        return issubclass(kind, (torch.Generator, list))
    if way.how == "attribute":
        if issubclass(kind, (type, FunctionType)):  # nobody sets those of what he was handed
            known = ("held", "class", "parameter") if issubclass(kind, type) else ("held",)
            return origin.kind in known
        return not issubclass(kind, _CONTAINERS) or hasattr(kind, "__dict__")
    method = way.name
    if way.how == "item":
        method = "__setitem__"
    elif way.how == "operator":
        method = _IN_PLACE.get(way.name, "__iadd__")
    return callable(getattr(kind, method, None)) and not _is_users(kind, method)


_IN_PLACE = {"|=": "__ior__", "&=": "__iand__", "-=": "__isub__", "^=": "__ixor__"}


def _is_users(kind: type, name: str) -> bool:
    """Whether a method is the user's own Python, which is looked at by itself."""
    found = getattr(kind, name)
    return type(found) is FunctionType and not is_trusted_code(found.__code__)


def _is_looked_after(value: Any) -> bool:
    """Whether an object is of a library's that has locks of its own, so that its maker sees to it,
    or is this library's own."""
    kind = type(value)
    if is_own_class(kind):
        return True
    module = sys.modules.get(kind.__module__)
    is_librarys = is_trusted_class(kind) or is_library_file(getattr(module, "__file__", None) or "")
    return is_librarys and any(is_a(held, _LOCKS) for _, held in _attributes(value))


def _memory_of(value: Any) -> Iterator[int]:
    """What else stands for an array, as it is its memory."""
    if is_a(value, torch.Tensor) and value.layout is torch.strided:
        yield value.untyped_storage()._cdata
    elif is_a(value, np.ndarray) and value.base is not None:
        yield id(value.base)


def _variables(namespace: dict[str, Any], name: str) -> Iterator[tuple[Hashable, Any]]:
    """A variable of a module, or all that are there now."""
    for each in list(namespace) if name == "*" else (name,):
        yield (id(namespace), each), namespace


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What is held by an object's attributes, a module's parameters and submodules among them, or
    by the variables around a function."""
    if type(value) is FunctionType:
        for name, cell in _cells(value):
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
    kind: Any = type(value)
    for name, descriptor in slots_of(kind):
        try:
            yield name, descriptor.__get__(value)
        except AttributeError:  # nothing is in it
            continue


_EMPTY = CellType()


def _cells(function: FunctionType) -> Iterable[tuple[str, CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _functions_of(value: Any) -> Iterator[FunctionType]:
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
    found = dict(zip(known[len(known) - len(defaults) :], defaults, strict=True))
    found.update(function.__kwdefaults__ or {})
    if name in found:
        yield found[name]


def _within(values: Iterable[Any], themselves: bool = True) -> Iterator[Any]:
    """What objects contain, and they themselves: else only arrays, of which there are views."""
    waiting, seen = deque((value, 0) for value in values), set[int]()
    while waiting and len(seen) < _MOST_CONTENTS:
        value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if depth or themselves or is_a(value, _MEMORIES):
            yield value
        if depth < _DEPTH:
            waiting.extend((part, depth + 1) for part in _parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    """What a container holds, or a module in its registries."""
    if is_a(value, dict):
        return list(dict.values(value))
    if is_a(value, nn.Module):
        held = vars(value)
        return [part for name in places.REGISTRIES for part in (held.get(name) or {}).values()]
    return list(value) if is_a(value, _CONTAINERS) else []
