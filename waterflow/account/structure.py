"""What an account holds, with every object as a number: equal for jobs that no code tells apart.

Two jobs are made of different objects, and their accounts compare pointers. Here each object is
the number in which it was met, so equal texts mean that there is a one-to-one map between what the
two can read: same code, same numbers and texts, same layouts of tensors, and the same object
wherever one job has the same object (tied weights, a module that is there twice, `is`). Objects
that no walk looks into are equal only if they are one and the same. A trace of the one is then a
trace of the other. Whatever has no rule here makes an account without a structure, which shares
nothing.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import datetime
import decimal
import dis
import fractions
import functools
import gc
import hashlib
import logging
import os
import pathlib
import random
import re
import struct
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from waterflow.account import places
from waterflow.account.bytecode import nested_codes
from waterflow.account.class_parts import DICTIONARY_VIEWS, is_a, is_behind_function, of_each_class
from waterflow.account.code_names import code_names
from waterflow.account.code_walk import READ_CELLS, READ_DEFAULTS, READ_GLOBALS
from waterflow.account.portable import NotPortableError, portable_name
from waterflow.account.probes import UNSET, Memo, is_plain, told_apart
from waterflow.account.trust import is_everybodys, is_trusted_class, is_trusted_code
from waterflow.allocator_ext import _C

if TYPE_CHECKING:
    from waterflow.account.account import Account
    from waterflow.account.library import LibraryPart

#: Numbers may be told apart by `is`; whether two equal texts are one object is up to Python.
_NUMBERS = frozenset({int, float, complex})
_SINGLE = frozenset({type(None), bool, type(...), type(NotImplemented), str, bytes})
_TORCH_ATOMS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
#: Objects whose text is their value.
_TEXTS: tuple[Any, ...] = (
    *(range, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
    *(datetime.timezone, decimal.Decimal, fractions.Fraction, torch.finfo, torch.iinfo),
)
#: Objects of these are what they are by themselves, and there is one for all jobs, or no sharing.
_PINNED: tuple[Any, ...] = (
    *(types.ModuleType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.GenericAlias, types.UnionType, logging.Logger, np.ufunc, torch._ops.OpOverload),
    *(torch._ops.OpOverloadPacket, torch._ops._OpNamespace, typing.TypeVar, typing._Final),  # type: ignore[attr-defined]
)
#: Without a state that code could read.
_BARE = frozenset({object})
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
#: Probes whose answers are plain values, identities of nothing.
_PLAIN_PROBES = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
#: What objects of classes derived from these hold beside attributes.
_VALUES: tuple[Any, ...] = (int, float, complex, str, bytes)


_ENVIRONMENT = os.environ._data  # type: ignore[attr-defined]


class NoStructureError(Exception):
    """An account has something that cannot be compared across jobs. Never a user's."""


class Structure:
    """The structure of an account.

    Attributes:
        digest: equal for equal structures, in one process, as long as `pinned` lives.
        portable: equal for equal structures of all processes with the same installation and
            environment; None where it was not asked for, or there is none.
        pinned: objects that are in the digest by their addresses.
        tensors: the tensors met, by their numbers.
    """

    def __init__(
        self,
        account: Account,
        roots: Iterable[Any],
        numbers_aside: Collection[int] = (),
        portable: bool = False,
    ) -> None:
        """Takes the structure of an account.

        Args:
            account: of one job.
            roots: what it was taken from.
            numbers_aside: identities of dictionaries whose numbers do not count.
            portable: whether other processes' are compared with it.

        Raises:
            NoStructureError: there is something that cannot be compared.
        """
        if account.unwalkable:
            raise NoStructureError(str(account.unwalkable[0][0]))
        own_codes = [code for code in account.own_codes if account.executes(code)]
        users = [code for code in own_codes if not is_trusted_code(code)]
        names = frozenset[str]().union(*(code_names(code).names for code in users))
        if not _READ_ANY_GLOBAL.isdisjoint(names):
            raise NoStructureError("code that may read any global")
        library = None if account.library is None else _written(account.library)
        writer = _Writer(account.own_places, account.executes, library, numbers_aside)
        writer.names_of_users = names
        for root in roots:
            writer.value(root)
        writer.run()
        if id(id) in writer.pinned or any(map(_may_hash, own_codes)):
            raise NoStructureError("code that may look at addresses")
        self.digest = _digest([*writer.words, None if library is None else library.digest])
        self.portable = _portable(writer, own_codes, library) if portable else None
        self.pinned: Collection[Any] = [*writer.pinned.values(), library]
        self.tensors: Mapping[int, torch.Tensor] = {
            number: value for number, value in enumerate(writer.met) if is_a(value, torch.Tensor)
        }

    def without_tensors(self) -> Structure:
        """The same structure, to be kept after its job has gone."""
        twin = copy.copy(self)
        twin.tensors = {}
        return twin

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor, None if the account has not met it."""
        return next((n for n, known in self.tensors.items() if known is tensor), None)


class _Rules(NamedTuple):
    """How objects of one type are written.

    Attributes:
        write: how they are, wherever they stand.
        values: the built-in bases with a value of their own.
        describe: what of them cannot change.
    """

    write: Callable[[_Writer, Any], None]
    values: tuple[Any, ...]
    describe: Callable[[_Writer, Any], None] | None

    @property
    def is_described(self) -> bool:
        return self.describe is not None


@of_each_class
def _rules_of(kind: type) -> _Rules:
    fitting = (describe for kinds, describe in _DESCRIBERS if issubclass(kind, kinds))
    values = tuple(base for base in _VALUES if issubclass(kind, base))
    return _Rules(_way_of(kind), values, next(fitting, None))


def _way_of(kind: type) -> Callable[[_Writer, Any], None]:
    """How objects of a type are written where they stand."""
    if kind in _SINGLE or kind in _TORCH_ATOMS:
        return _Writer._atom
    if kind is tuple or kind is torch.Size:
        return _Writer._values
    if kind in _NUMBERS:
        return _Writer._plain_number
    if issubclass(kind, type):
        return _Writer._type_here
    if kind is types.FunctionType:
        return _Writer._function_here
    if kind is types.BuiltinFunctionType:
        return _Writer._built_in_here
    return _Writer._pin if issubclass(kind, _PINNED) else _Writer._object


class _Writer:
    def __init__(
        self,
        written: Collection[places.Place],
        executes: Callable[[types.CodeType], bool],
        library: _Written | None = None,
        numbers_aside: Collection[int] = (),
    ) -> None:
        self.words: list[Any] = []
        self.pinned: dict[int, Any] = {}
        self.pins: list[int] = []  # where among the words their addresses are
        self.environment = slice(0, 0)  # where the process's environment is
        self.met: list[Any] = []  # by number; kept, so that no identity is used twice
        self.names_of_users = frozenset[str]()
        self._places = [each for each in written if type(each) is not places.LibraryFunctions]
        self._executes = executes
        self._librarys: Mapping[int, int] = {} if library is None else library.numbers
        self._numbers_aside = numbers_aside
        self._numbers: dict[int, int] = {}
        self._hook_keys: dict[int, int] = {}
        self._hooks: set[int] = set()
        self._storages: dict[int, int] = {}
        self._waiting: collections.deque[Any] = collections.deque()
        self._placed = {id(holder) for place in self._places for holder in _holders_of(place)}

    def run(self) -> None:
        """Writes every place, in the order of the walk."""
        self._drain()
        for place in self._places:
            began = len(self.words)
            self.words += "@", type(place).__name__
            holders = _holders_of(place)
            for holder in holders:
                self.value(holder)
            _PLACES[type(place)](self, place)
            self._drain()
            if holders[0] is _ENVIRONMENT:
                self.environment = slice(began, len(self.words))

    def _drain(self) -> None:
        while self._waiting:
            self._describe(self._waiting.popleft())

    # Values, where they stand

    def value(self, value: Any) -> None:
        _rules_of(type(value)).write(self, value)

    def _atom(self, value: Any) -> None:
        self.words.append(repr(value))

    def _values(self, value: Any) -> None:
        self.words.append(type(value).__name__)
        self._sequence(value)

    def _plain_number(self, value: Any) -> None:
        if self._is_new(value):
            kind = type(value)
            self.words += kind.__name__, _TOLD.get(kind, int)(value)

    def _object(self, value: Any) -> None:
        if id(value) in self._librarys:
            self._pin(value)
        elif self._is_new(value):
            self._waiting.append(value)

    def _type_here(self, value: type) -> None:
        is_pinned = id(value) in self.pinned  # most are met again and again
        is_own = not (is_pinned or is_trusted_class(value)) and id(value) in self._placed
        (self._object if is_own else self._pin)(value)

    def _function_here(self, value: types.FunctionType) -> None:
        is_own = id(value) in self._placed or not (
            value.__closure__ is None or is_everybodys(value)
        )
        (self._object if is_own else self._pin)(value)

    def _built_in_here(self, value: types.BuiltinFunctionType) -> None:
        owner = value.__self__
        own_kind = types.ModuleType, type, type(None)
        is_own = not (is_a(owner, own_kind) or is_behind_function(owner))
        (self._object if is_own else self._pin)(value)

    def _pin(self, value: Any) -> None:
        self.pinned[id(value)] = value
        self.words += "!", id(value)
        self.pins.append(len(self.words) - 1)
        if self._librarys:
            self.words.append(self._librarys.get(id(value)))

    def _everybodys(self, value: Any) -> None:
        """A value that a class or a module has: of torch's, not all are walked."""
        kind = type(value)
        walked = id(value) in self._placed or _rules_of(kind).is_described or kind in _BARE
        if walked or kind in _SINGLE or kind in _TORCH_ATOMS or kind in _NUMBERS:
            self.value(value)
        else:
            self._pin(value)

    def _is_new(self, value: Any) -> bool:
        """Writes the number of an object."""
        number = self._numbers.setdefault(id(value), len(self.met))
        is_new = number == len(self.met)
        if is_new:
            self.met.append(value)
        self.words += "#", number
        return is_new

    def _sequence(self, values: Collection[Any]) -> None:
        self.words += "(", len(values)
        for value in values:
            self.value(value)

    # Objects, described once: what of them cannot change. What can is in their places.

    def _describe(self, value: Any) -> None:
        kind = type(value)
        self.words.append("is")
        self.value(kind)
        rules = _rules_of(kind)
        for base in rules.values:
            self.words.append(_TOLD.get(base, base.__repr__)(value))
        if rules.describe is not None:
            rules.describe(self, value)
        elif id(value) not in self._placed and kind not in _BARE:
            raise NoStructureError(f"an object of {kind.__module__}.{kind.__qualname__}")

    def _class(self, value: type) -> None:
        self.words += value.__module__, value.__qualname__, value.__name__, value.__flags__
        self._sequence(value.__mro__[1:])
        self._sequence(value.__bases__)

    def _function(self, value: types.FunctionType) -> None:
        self.value(value.__code__)
        self.words += value.__module__, value.__name__, value.__qualname__, value.__doc__
        executed = self._executes(value.__code__)
        if executed or not READ_DEFAULTS.isdisjoint(self.names_of_users):
            self.value(value.__defaults__)
            self.value(value.__kwdefaults__)
        if executed or not READ_CELLS.isdisjoint(self.names_of_users):
            self._sequence(value.__closure__ or ())
        if executed and not is_trusted_code(value.__code__):
            namespace = value.__globals__
            self._placed.add(id(namespace))  # all that is read of it is in a place
            self.value(namespace)

    def _cell(self, value: types.CellType) -> None:
        if id(value) not in self._placed:
            self._sequence([value.cell_contents] if _is_full(value) else [])

    def _method(self, value: types.MethodType) -> None:
        self._sequence((value.__func__, value.__self__))

    def _bound(self, value: Any) -> None:
        self.words.append(value.__qualname__)
        self.value(value.__self__)

    def _partial(self, value: functools.partial[Any]) -> None:
        self._sequence((value.func, value.args, value.keywords))

    def _wrapper(self, value: Any) -> None:
        self.value(value.__func__)
        for name, attribute in vars(value).items():
            if name in _COPIED:  # from the function, but somebody may have set them since
                self.words += name, repr(attribute)
            elif name not in functools.WRAPPER_ASSIGNMENTS and name != "__wrapped__":
                self.words.append(name)
                self.value(attribute)

    def _property(self, value: property) -> None:
        self.words.append(value.__doc__)
        self._sequence((value.fget, value.fset, value.fdel))

    def _cached_property(self, value: functools.cached_property[Any]) -> None:
        self._sequence((value.func, value.attrname))

    def _memo(self, value: Any) -> None:
        self.value(value.__wrapped__)

    def _dispatched(self, value: functools.singledispatchmethod[Any]) -> None:
        self._sequence((value.func, value.dispatcher.registry))

    def _items(self, value: Collection[Any]) -> None:
        base: Any = tuple if is_a(value, tuple) else frozenset
        self._sequence(list(base.__iter__(value)))

    def _view(self, value: Any) -> None:
        self._sequence(gc.get_referents(value))

    def _default_dictionary(self, value: collections.defaultdict[Any, Any]) -> None:
        factory: Any = vars(collections.defaultdict)["default_factory"]
        self.value(factory.__get__(value))

    def _deque(self, value: collections.deque[Any]) -> None:
        self.words.append(collections.deque.maxlen.__get__(value))  # type: ignore[attr-defined]

    def _slice(self, value: slice) -> None:
        self._sequence((value.start, value.stop, value.step))

    def _pattern(self, value: re.Pattern[Any]) -> None:
        self.words += value.pattern, value.flags

    def _text(self, value: Any) -> None:
        self.words.append(repr(value))

    def _number(self, value: np.generic) -> None:
        self.words += repr(value.dtype), value.tobytes()

    def _dtype(self, value: np.dtype[Any]) -> None:
        self.words.append(repr(value))
        self._sequence([*(value.metadata or {}).items()])
        inner = [value.base] if value.subdtype else [part for part, *_ in _fields_of(value)]
        for part in inner:
            self._dtype(part)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        self._dtype(value.dtype)
        self.words += value.shape, value.strides, value.base is None
        self.words += value.flags.writeable, value.flags.owndata, value.flags.aligned

    def _reference(self, value: weakref.ref[Any]) -> None:
        self.value(weakref.ref.__call__(value))
        descriptor: Any = vars(weakref.ref)["__callback__"]
        callback = descriptor.__get__(value)
        own = type(callback) is types.FunctionType
        self.value(callback.__code__ if own else type(callback))

    def _lock(self, value: Any) -> None:
        """Whether it is held, and how often, but not by whom."""
        self.words += _HELD.findall(repr(value))

    def _tensor(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided or value.grad_fn is not None:
            raise NoStructureError("a tensor without plain memory, or with a history")
        storage = value.untyped_storage()
        self.words += repr(value.dtype), tuple(value.shape), value.stride(), repr(value.device)
        self.words += value.storage_offset(), storage.nbytes(), _C.tensor_flags(value)
        # Parameters' come and go; whether a step finds those is looked at with the gradients.
        self.words += value._is_view(), is_a(value, nn.Parameter) or value.grad is None
        self.words += "storage", self._storages.setdefault(storage._cdata, len(self._storages))

    # Places

    def _attributes(self, place: places.Attributes) -> None:
        own = is_a(place.holder, (nn.Module, torch.optim.Optimizer, torch.Tensor))
        self._head(place)
        for name, value in place.before.items():
            self.words.append(name)
            if own and "hooks" in name:
                self._hooks.add(id(value))
            self.value(value)

    def _head(self, place: places.Attributes | places.Mapping) -> None:
        skipped = sorted(map(str, place.skipped or ()))
        self.words += len(place.before), len(skipped), *skipped

    def _class_attributes(self, place: places.ClassAttributes) -> None:
        self.words.append(len(place.before))
        for name, value in place.before.items():
            self.words.append(name)
            self._everybodys(value)

    def _names(self, place: places.Names) -> None:
        self.words.append(str(place.namespace.get("__name__")))  # whose these are
        for name in sorted(place.trails):
            self.words.append(name)
            if name in place.before:
                self._everybodys(place.before[name])
            else:
                self.words.append("nothing")

    def _mapping(self, place: places.Mapping) -> None:
        aside, hooks = id(place.holder) in self._numbers_aside, id(place.holder) in self._hooks
        self._head(place)
        for key, value in place.before:
            if hooks and type(key) is int:  # counts all hooks there ever were
                self.words += "hook", self._hook_keys.setdefault(key, len(self._hook_keys))
            else:
                self.value(key)
            if aside and type(value) is float:
                self.words.append("number")
            elif aside and type(value) is tuple and all(type(part) is float for part in value):
                self.words += "numbers", len(value)
            else:
                self.value(value)

    def _order(self, place: places.Order) -> None:
        numbers = {id(key): number for number, key in enumerate(dict.__iter__(place.holder))}
        self.words.append([numbers[id(key)] for key in place.before])

    def _contents(self, place: Any) -> None:
        self._sequence(place.before)

    def _only_holders(self, place: places.Place) -> None:
        """All else is described with them."""

    def _tensor_place(self, place: places.Tensor) -> None:
        for hooks in (place.tensor._backward_hooks, place.tensor._post_accumulate_grad_hooks):
            if hooks:
                self._hooks.add(id(hooks))
                self.value(hooks)
            else:
                self.words.append("no hooks")

    def _memory(self, place: places.Memory) -> None:
        own = isinstance(place.before, (bytes, bytearray))
        held = place.before if own else place.before.tobytes()
        form = getattr(place.holder, "typecode", None) or getattr(place.holder, "format", None)
        self.words += form, place.writeable, hashlib.sha256(held).hexdigest()
        if type(place.holder) is memoryview:
            self.words += place.holder.shape, place.holder.strides, place.holder.readonly

    def _probed(self, place: places.Probed) -> None:
        if is_a(place.holder, np.ndarray) and not place.holder.dtype.hasobject:
            self.words.append(hashlib.sha256(repr(place.before).encode()).hexdigest())
        elif type(place.holder) in _PLAIN_PROBES:
            self.words.append(place.before)
        elif type(place.holder) is contextvars.ContextVar:
            self.words += place.holder.name, _context_value(place)
        elif type(place.holder) is Memo and all(
            is_plain(each) for entry in place.before for each in entry
        ):
            self.words.append(repr(sorted(map(repr, place.before))))
        elif not is_a(place.holder, (weakref.ref, collections.defaultdict)):  # told with them
            raise NoStructureError(f"the state of {place.trail}")

    def _slot(self, place: places.Slot) -> None:
        self.words.append(place.descriptor.__name__)
        self._sequence(place.before)


def _digest(words: list[Any]) -> str:
    return hashlib.sha256(repr(words).encode("utf-8", "surrogatepass")).hexdigest()


class _Written(NamedTuple):
    """A part of the library, written once for all accounts that have it.

    Attributes:
        digest: equal for equal parts, as long as `pinned` live.
        portable: equal for equal parts of all processes, None where there is none.
        numbers: of the objects in it, by their identities.
        pinned: objects that are in the digest by their addresses.
    """

    digest: str
    portable: str | None
    numbers: Mapping[int, int]
    pinned: tuple[Any, ...]


@functools.lru_cache(maxsize=256)
def _written(part: LibraryPart) -> _Written:
    writer = _Writer(part.places, part.executes)
    writer.run()
    objects = [*writer.met, *writer.pinned.values()]
    numbers = {id(value): number for number, value in enumerate(objects)}
    return _Written(_digest(writer.words), _portable(writer, (), None), numbers, tuple(objects))


def _portable(
    writer: _Writer, own_codes: Iterable[types.CodeType], library: _Written | None
) -> str | None:
    """The digest with names in place of addresses.

    Without the process's environment, which no account tells from what code reads of it: where the
    user's code names it, there is none.
    """
    own = [code for code in own_codes if not is_trusted_code(code)]
    if any(_READS_ENVIRONMENT & code_names(code).names for code in own):
        return None
    if any(map(_may_go_through_sets, own)):
        return None
    if library is not None and library.portable is None:
        return None
    words = list(writer.words)
    try:
        # With its number, as two objects may be called the same.
        names = {
            address: (number, portable_name(value))
            for number, (address, value) in enumerate(writer.pinned.items())
        }
    except NotPortableError:
        return None
    for place in writer.pins:
        words[place] = names[words[place]]
    kept = words[: writer.environment.start] + words[writer.environment.stop :]
    return _digest([*kept, None if library is None else library.portable])


#: Names by which code reads variables of the environment.
_READS_ENVIRONMENT = frozenset(
    {"environ", "environb", "getenv", "getenvb", "expandvars", "expanduser", "home"}
)


#: Instructions that make sets, which are gone through in an order of the process's own.
_MAKE_SETS = frozenset(dis.opmap[name] for name in ("BUILD_SET", "SET_ADD", "SET_UPDATE"))


def _may_go_through_sets(code: types.CodeType) -> bool:
    """Whether code may go by the hashes of texts, which each process makes in its own way."""
    names = code_names(code).names
    if "__hash__" in names or {"set", "frozenset"} & code_names(code).global_names:
        return True
    return any(
        not _MAKE_SETS.isdisjoint(part.co_code[::2])
        or any(type(each) is frozenset and len(each) > 1 for each in part.co_consts)
        for part in nested_codes(code)
    )


#: Attributes of functions that static methods and those of classes copy, and that are texts.
_COPIED = frozenset({"__module__", "__name__", "__qualname__", "__doc__"})


def float_bits(value: float) -> bytes:
    """A number's bits: 0.0 is not -0.0, and what is no number may be told apart from another."""
    return struct.pack(">d", value)


def complex_bits(value: complex) -> bytes:
    """The bits of both parts."""
    return struct.pack(">dd", complex.real.__get__(value), complex.imag.__get__(value))  # type: ignore[attr-defined]


_TOLD: dict[type, Callable[[Any], Any]] = {float: float_bits, complex: complex_bits}


def _holders_of(place: Any) -> tuple[Any, ...]:
    if type(place) is places.Empties:
        return place.holders
    return (getattr(place, _HOLDERS.get(type(place), "holder")),)


#: Names by which code reads any global, whatever it is called: it is in no place.
_READ_ANY_GLOBAL = READ_GLOBALS | {"__builtins__"}
#: In the text of a lock; the count is a lock's that may be held again.
_HELD = re.compile(r"^<(?:un)?locked|count=\d+")


def _fields_of(value: np.dtype[Any]) -> Collection[tuple[Any, ...]]:
    return () if value.fields is None else value.fields.values()


def _may_hash(code: types.CodeType) -> bool:
    """Whether code may ask for hashes, which can be made of addresses; methods that data classes
    are given are there for dictionaries."""
    is_made = code.co_filename == "<string>" and code.co_name == "__hash__"
    return "hash" in code_names(code).global_names and not is_made and not is_trusted_code(code)


def _context_value(place: places.Probed) -> str:
    """The value of a context variable, or that it has none beside its default, if that is plain."""
    told = place.before
    is_set = told != UNSET
    if not is_set:
        try:
            told = told_apart(contextvars.Context().run(place.holder.get))
        except LookupError:
            return "neither value nor default"
    if not is_plain(told):
        raise NoStructureError(f"the state of {place.trail}")
    return f"{'value' if is_set else 'default'} {told!r}"


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


_HOLDERS: dict[type, str] = {
    places.ClassAttributes: "kind",
    places.Names: "namespace",
    places.Cell: "cell",
    places.Function: "function",
    places.Tensor: "tensor",
    places.Registered: "before",
    places.Settings: "before",
}

_PLACES: dict[type, Callable[[_Writer, Any], None]] = {
    places.Attributes: _Writer._attributes,
    places.ClassAttributes: _Writer._class_attributes,
    places.Names: _Writer._names,
    places.Mapping: _Writer._mapping,
    places.Items: _Writer._contents,
    places.Cell: _Writer._contents,
    places.Order: _Writer._order,
    places.Empties: _Writer._only_holders,
    places.Function: _Writer._only_holders,
    places.Slot: _Writer._slot,
    places.Tensor: _Writer._tensor_place,
    places.Memory: _Writer._memory,
    places.Probed: _Writer._probed,
    places.Registered: _Writer._only_holders,
    places.Settings: _Writer._only_holders,
}

#: What of an object cannot change; the first kind that fits counts.
_DESCRIBERS: list[tuple[Any, Callable[[_Writer, Any], None]]] = [
    (torch.Tensor, _Writer._tensor),
    (type, _Writer._class),
    (types.FunctionType, _Writer._function),
    (types.CellType, _Writer._cell),
    (types.MethodType, _Writer._method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _Writer._bound),
    (functools.partial, _Writer._partial),
    ((staticmethod, classmethod), _Writer._wrapper),
    (property, _Writer._property),
    (functools.cached_property, _Writer._cached_property),
    (Memo, _Writer._memo),
    (functools.singledispatchmethod, _Writer._dispatched),
    ((tuple, frozenset), _Writer._items),
    (DICTIONARY_VIEWS, _Writer._view),
    (collections.defaultdict, _Writer._default_dictionary),
    (collections.deque, _Writer._deque),
    (slice, _Writer._slice),
    (re.Pattern, _Writer._pattern),
    (_TEXTS, _Writer._text),
    (pathlib.PurePath, _Writer._text),
    (np.generic, _Writer._number),
    (np.dtype, _Writer._dtype),
    (np.ndarray, _Writer._array),
    (weakref.ref, _Writer._reference),
    (_LOCKS, _Writer._lock),
]
