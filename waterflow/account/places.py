"""The places of an account of Python state: what users call them, and how each is put back."""

from __future__ import annotations

# ruff: noqa: D102  (what the methods do is said once, in Place)
import abc
import decimal
import functools
import itertools
import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from waterflow.account import probes
from waterflow.account.class_parts import IdentityKey, is_a
from waterflow.account.trust import is_trusted_class
from waterflow.allocator_ext import _C
from waterflow.common.environment import is_library

#: What modules have their parameters, buffers and modules in, called as their attributes.
REGISTRIES = ("_parameters", "_buffers", "_modules")
_PLAIN_KEYS = (str, int, float, bool, bytes, complex, type(None))


class Trail:
    """How something was reached, put into words only when somebody asks."""

    __slots__ = ("label", "parent")

    def __init__(self, label: Any, parent: Trail | None = None) -> None:
        self.label, self.parent = label, parent

    def attribute(self, name: str) -> Trail:
        """That of an attribute."""
        return Trail(f".{name}", self)

    def item(self, key: Any) -> Trail:
        """That of what a container holds."""
        return Trail((key,), self)

    def __str__(self) -> str:
        parts = []
        trail: Trail | None = self
        while trail is not None:
            parts.append(trail.label if isinstance(trail.label, str) else _item_text(*trail.label))
            trail = trail.parent
        return "".join(reversed(parts))


class Within(Trail):
    """How an object was reached some of whose attributes are looked at, here and there thousands
    that are not there: they have this in common."""

    __slots__ = ()

    def __init__(self, holder: Trail) -> None:
        super().__init__("", holder)


def _item_text(key: Any) -> str:
    return f"[{key!r}]" if type(key) in _PLAIN_KEYS else f"[an object of {type(key).__qualname__}]"


class Place:
    """One place that is checked."""

    __slots__ = ("trail",)

    def __init__(self, trail: Trail) -> None:
        self.trail = trail

    def text(self, part: Any) -> str:
        """What to call it, or the part of it that differs (as `_C.Guards.difference` says it)."""
        return str(self.trail) if part is None else f"{self.trail}.{part}"

    def restore(self) -> None:
        """Puts back what was there, as far as that is possible."""


class Attributes(Place):
    """Attributes of an object."""

    __slots__ = ("before", "holder", "kind", "names", "skipped")

    def __init__(
        self,
        trail: Trail,
        holder: Any,
        before: list[tuple[str, Any]],
        names: frozenset[str] | None,
        skipped: Collection[Any] | None,
    ) -> None:
        super().__init__(trail)
        self.holder, self.kind, self.before = holder, type(holder), dict(before)
        self.names, self.skipped = names, skipped

    def restore(self) -> None:
        if type(self.holder) is not self.kind:
            object.__setattr__(self.holder, "__class__", self.kind)
        current = _C.instance_dict(self.holder)
        if current is None:
            return
        for name in [name for name in current if self._counts(name) and name not in self.before]:
            dict.__delitem__(current, name)
        for name, value in self.before.items():
            if name not in current or current[name] is not value:
                dict.__setitem__(current, name, value)

    def _counts(self, name: Any) -> bool:
        wanted = self.names is None or name in self.names
        return type(name) is str and wanted and name not in (self.skipped or ())


class ClassAttributes(Place):
    """Attributes of a class's own, and what it is derived from."""

    __slots__ = ("bases", "before", "kind", "watched")

    def __init__(
        self,
        trail: Trail,
        kind: type,
        before: list[tuple[str, Any]],
        watched: Callable[[str], bool],
    ) -> None:
        super().__init__(trail)
        self.kind, self.before, self.watched = kind, dict(before), watched
        self.bases = kind.__bases__

    def restore(self) -> None:
        if self.kind.__bases__ != self.bases:
            self.kind.__bases__ = self.bases
        current = dict(vars(self.kind))
        for name in current:
            if name not in self.before and self.watched(name):
                type.__delattr__(self.kind, name)
        for name, value in self.before.items():
            if name not in current or current[name] is not value:
                type.__setattr__(self.kind, name, value)


class Names(Place):
    """Some names of a module; each is called as the code that reads it would."""

    __slots__ = ("before", "namespace", "trails")

    def __init__(self, namespace: dict[str, Any], trails: dict[str, Trail]) -> None:
        super().__init__(Trail("a global"))
        self.namespace, self.trails = namespace, trails
        self.before = {name: namespace[name] for name in trails if name in namespace}

    def text(self, part: Any) -> str:
        trail = self.trails[part]
        return str(trail.attribute(part) if type(trail) is Within else trail)

    def restore(self) -> None:
        for name in self.trails:
            if name in self.before:
                if self.namespace.get(name) is not self.before[name]:
                    self.namespace[name] = self.before[name]
            else:
                self.namespace.pop(name, None)


class Mapping(Place):
    """The items of a dictionary."""

    __slots__ = ("before", "dotted", "holder", "skipped")

    def __init__(
        self,
        trail: Trail,
        holder: dict[Any, Any],
        before: list[tuple[Any, Any]],
        skipped: Collection[Any] | None,
        dotted: bool,
    ) -> None:
        super().__init__(trail)
        # Most are empty: hooks of modules. The fewer objects stay, the rarer are collections.
        self.before: Sequence[tuple[Any, Any]] = before or ()
        self.holder, self.skipped, self.dotted = holder, skipped, dotted

    def text(self, part: Any) -> str:
        if part is None or self.dotted:
            return super().text(part)
        return str(self.trail.item(part))

    def restore(self) -> None:
        base: Any = OrderedDict if is_a(self.holder, OrderedDict) else dict
        kept = [item for item in base.items(self.holder) if self._is_skipped(item[0])]
        base.clear(self.holder)
        for key, value in [*self.before, *kept]:
            base.__setitem__(self.holder, key, value)

    def _is_skipped(self, key: Any) -> bool:
        return type(key) in (str, int) and key in (self.skipped or ())


class Order(Place):
    """The order of an OrderedDict, which its dictionary does not have."""

    __slots__ = ("before", "holder")

    def __init__(self, trail: Trail, holder: Any, before: list[Any]) -> None:
        super().__init__(trail)
        self.holder, self.before = holder, before

    def text(self, part: Any) -> str:
        return f"the order of {self.trail}"

    def restore(self) -> None:
        for key in self.before:
            OrderedDict.move_to_end(self.holder, key)


class Empties(Place):
    """Attributes of a module that are empty dictionaries, as nearly all of its hooks are."""

    __slots__ = ("holders", "names")

    def __init__(self, trail: Trail, attributes: Collection[tuple[str, dict[Any, Any]]]) -> None:
        super().__init__(trail)
        self.names = tuple(name for name, _ in attributes)
        self.holders = tuple(holder for _, holder in attributes)

    def text(self, part: Any) -> str:
        name, key = self.names[part], next(iter(self.holders[part]), None)
        if name in REGISTRIES:
            return str(self.trail.attribute(str(key)))
        return str(self.trail.attribute(name).item(key))

    def restore(self) -> None:
        for holder in self.holders:
            holder.clear()


class Items(Place):
    """The items of a list, a set or a deque."""

    __slots__ = ("base", "before", "holder")

    def __init__(self, trail: Trail, holder: Any, base: Any, before: list[Any]) -> None:
        super().__init__(trail)
        self.holder, self.base, self.before = holder, base, before

    def text(self, part: Any) -> str:
        indexed = part is not None and self.base is not set
        return str(self.trail.item(part)) if indexed else str(self.trail)

    def restore(self) -> None:
        if self.base is set:
            _fill_set(self.holder, self.before)
        else:
            self.base.clear(self.holder)
            self.base.extend(self.holder, self.before)


#: Orders of insertion that are tried for one order of iteration.
_MOST_ORDERS = 64


def _fill_set(holder: set[Any], items: list[Any]) -> None:
    """Gives a set these items, to be iterated in this order: where the hashes of some collide, it
    depends on who came first."""
    shuffled, order = random.Random(0), list(items)
    for _ in range(_MOST_ORDERS):
        set.clear(holder)
        set.update(holder, order)
        if all(map(operator.is_, set.__iter__(holder), items)):
            return
        shuffled.shuffle(order)


class Cell(Place):
    """A variable in a function's closure."""

    __slots__ = ("before", "cell")

    def __init__(self, trail: Trail, cell: types.CellType, before: list[Any]) -> None:
        super().__init__(trail)
        self.cell, self.before = cell, before

    def restore(self) -> None:
        if self.before:
            self.cell.cell_contents = self.before[0]
        else:
            del self.cell.cell_contents


#: What can be set of a function.
_OF_FUNCTIONS = "__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__doc__"


class Function(Place):
    """A function's code, defaults and names."""

    __slots__ = ("before", "function")

    def __init__(self, trail: Trail, function: types.FunctionType) -> None:
        super().__init__(trail)
        self.function = function
        self.before = [getattr(function, name) for name in _OF_FUNCTIONS]

    def restore(self) -> None:
        for name, value in zip(_OF_FUNCTIONS, self.before, strict=True):
            setattr(self.function, name, value)


class LibraryFunctions(Place):
    """Code and defaults of the library's functions, which nobody has changed: no part of a
    structure."""

    __slots__ = ("before", "functions")

    def __init__(self, functions: Collection[types.FunctionType]) -> None:
        super().__init__(Trail("the library"))
        self.functions = tuple(functions)
        self.before = [(each.__code__, each.__defaults__) for each in functions]

    def text(self, part: Any) -> str:
        return f"the function {self.functions[part].__qualname__}"

    def restore(self) -> None:
        for function, before in zip(self.functions, self.before, strict=True):
            if function.__code__ is not before[0] or function.__defaults__ is not before[1]:
                function.__code__, function.__defaults__ = before


class Registered(Place):
    """Which classes abstract ones have been told to take for their own: not those of libraries
    that libraries have told of, which come and go with imports."""

    __slots__ = ("_classes", "_known", "_token", "before")

    def __init__(self, classes: tuple[type, ...]) -> None:
        super().__init__(Trail("what abstract classes take for their own"))
        self._classes = classes
        self._token: object = None
        self._known: tuple[tuple[type, type], ...] = ()
        self.before = self.read()

    def read(self) -> tuple[tuple[type, type], ...]:
        """Abstract classes and what they were told of."""
        if (token := abc.get_cache_token()) != self._token:
            told = (_TOLD.of(kind, token) for kind in self._classes)
            self._known, self._token = tuple(itertools.chain.from_iterable(told)), token
        return self._known


class Settings(Place):
    """By what libraries go that nobody passes to them: how decimals are rounded, what becomes of
    numpy's overflows, how it prints. They belong to the context of the job's Python."""

    __slots__ = ("_libraries", "before")

    def __init__(self, libraries: Collection[str]) -> None:
        super().__init__(Trail(f"a setting of {' or '.join(sorted(libraries))}"))
        self._libraries = sorted(libraries)
        self.before = self.read()

    def read(self) -> tuple[object, ...]:
        """The settings as they are."""
        return tuple(SETTINGS[library]() for library in self._libraries)


def _of_decimals() -> tuple[object, ...]:
    now = decimal.getcontext()
    traps = tuple(signal.__name__ for signal, is_set in now.traps.items() if is_set)
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, traps


def _of_numpy() -> tuple[object, ...]:
    told = (*np.geterr().values(), *np.get_printoptions().values(), np.getbufsize())
    return *map(str, told), np.geterrcall()


#: By library, what it goes by.
SETTINGS: dict[str, Callable[[], tuple[object, ...]]] = {
    "decimal": _of_decimals,
    "numpy": _of_numpy,
}


class _Told:
    """What each abstract class was told of, until the next one is told of something."""

    def __init__(self) -> None:
        self._token: object = None
        self._known: dict[IdentityKey, tuple[tuple[type, type], ...]] = {}

    def of(self, kind: type, token: object) -> tuple[tuple[type, type], ...]:
        """Pairs of the class, or of one derived from it, and what that was told of."""
        if token != self._token:
            self._token, self._known = token, {}
        key = IdentityKey(kind)
        if key not in self._known:
            self._known[key] = tuple(_registered(kind))
        return self._known[key]


_TOLD = _Told()


def _is_of_library(kind: type) -> bool:
    return is_trusted_class(kind) or is_library(str(kind.__module__))


def _registered(kind: type) -> Iterator[tuple[type, type]]:
    registry = abc._get_dump(kind)[0]  # type: ignore[attr-defined]
    own = [told for reference in registry if (told := reference()) is not None]
    for told in sorted(own, key=lambda one: (one.__module__, one.__qualname__)):
        if not (_is_of_library(kind) and _is_of_library(told)):
            yield kind, told
    derived: list[type] = type.__subclasses__(kind)
    for each in derived:
        yield from _registered(each)


class Slot(Place):
    """A slot of an object."""

    __slots__ = ("before", "descriptor", "holder")

    def __init__(self, trail: Trail, holder: Any, descriptor: Any, before: list[Any]) -> None:
        super().__init__(trail)
        self.holder, self.descriptor, self.before = holder, descriptor, before

    def restore(self) -> None:
        if self.descriptor.__objclass__ is functools.partial:
            _set_of_partial(self.holder, self.descriptor, self.before[0])
        elif self.before:
            self.descriptor.__set__(self.holder, self.before[0])
        else:
            self.descriptor.__delete__(self.holder)


def _set_of_partial(holder: functools.partial[Any], descriptor: Any, value: Any) -> None:
    """Gives a partial its function, arguments or keywords, which can only be set all at once."""
    fields = [vars(functools.partial)[name] for name in ("func", "args", "keywords")]
    state = [value if each is descriptor else each.__get__(holder) for each in fields]
    functools.partial.__setstate__(holder, (*state, vars(holder)))  # type: ignore[attr-defined]


class Tensor(Place):
    """What a tensor is. Its storage is not kept, so another one stays."""

    __slots__ = ("before", "tensor")

    def __init__(self, trail: Trail, tensor: Any) -> None:
        super().__init__(trail)
        self.tensor = tensor
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        self.before = tensor.requires_grad, *hooks

    def restore(self) -> None:
        requires_grad, backward, accumulate = self.before
        if self.tensor.is_leaf and self.tensor.requires_grad != requires_grad:
            self.tensor.requires_grad_(requires_grad)
        if self.tensor._backward_hooks is not backward:
            self.tensor._backward_hooks = backward
        if self.tensor._post_accumulate_grad_hooks is not accumulate:
            self.tensor._post_accumulate_grad_hooks = accumulate


class Memory(Place):
    """What an array holds."""

    __slots__ = ("before", "holder", "writeable")

    def __init__(self, trail: Trail, holder: Any) -> None:
        super().__init__(trail)
        self.holder = holder
        self.before: Any
        self.writeable = True
        if isinstance(holder, np.ndarray):
            self.before, self.writeable = probes.array_kept(holder)
        else:
            self.before = holder[:]
        if isinstance(holder, memoryview):
            self.before = holder.tobytes()

    def restore(self) -> None:
        if isinstance(self.holder, np.ndarray):
            probes.put_back_array(self.holder, (self.before, self.writeable))
        else:
            self.holder[:] = self.before


class Probed(Place):
    """Something that tells its state when asked, and may take it back."""

    __slots__ = ("before", "holder", "kept", "put_back")

    def __init__(self, trail: Trail, holder: Any, before: Any, probe: probes.Probe) -> None:
        super().__init__(trail)
        self.holder, self.before, self.put_back = holder, before, probe.put_back
        self.kept = before if probe.keep is None else probe.keep(holder)

    def restore(self) -> None:
        if self.put_back is not None:
            self.put_back(self.holder, self.kept)


#: Bases of containers whose items are checked one by one.
ITEM_BASES: tuple[Any, ...] = (list, set, deque)
