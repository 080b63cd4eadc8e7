"""What objects of a class consist of, and which objects never change."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import ipaddress
import logging
import operator
import pathlib
import re
import sys
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from waterflow.account.trust import is_trusted_class, is_trusted_code, is_trusted_name
from waterflow.allocator_ext import _C

_HEAP_TYPE = 1 << 9  # a flag of classes that are made at run time, as class statements do
_IMMUTABLE_TYPE = 1 << 8

#: Attributes of classes that say nothing which their functions and values do not.
CLASS_NOISE = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__"),
        *("__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__"),
        *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
        *("__subclasshook__", "__dataclass_params__", "__protocol_attrs__", "_is_protocol"),
        "__slotnames__",  # written by the first copy or pickle of an object
    }
)
#: Objects of exactly these types hold nothing that can change.
CONSTANTS: frozenset[type] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
        *(type(NotImplemented), type(NotImplemented), types.CodeType, object, re.Pattern),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo),
        *(torch.iinfo, types.GenericAlias, types.UnionType, types.GetSetDescriptorType),
        *(types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(types.ClassMethodDescriptorType, operator.itemgetter, type(threading.Lock())),
        *(type(threading.RLock()), datetime.datetime, datetime.date, datetime.time, np.ufunc),
        *(datetime.timedelta, datetime.timezone, fractions.Fraction, uuid.UUID),
        *(pathlib.PurePath, pathlib.PurePosixPath, pathlib.PosixPath, ipaddress.IPv4Address),
        *(pathlib.WindowsPath, pathlib.PureWindowsPath, type(sys.flags), type(sys.version_info)),
    }
)

#: Classes whose objects, and those of libraries' derived ones, are taken for constant: loggers,
#: annotations, torch's operators.
_CONSTANT_BASES: tuple[Any, ...] = (
    *(logging.Logger, logging.Handler, np.generic, np.dtype, np.ufunc, pathlib.PurePath),
    decimal.Decimal,  # of which a walk notes that there are any
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace),
    *(typing.TypeVar, typing.ParamSpec, typing._Final),  # type: ignore[attr-defined]
)
#: What shows what a dictionary holds.
DICTIONARY_VIEWS: tuple[Any, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
#: Named only: their classes have no public names in all versions.
_CONSTANT_NAMES = frozenset(
    {"_abc_data", "PyCapsule", "_ArrayFunctionDispatcher", "instancemethod", "_tuplegetter"}
)

#: Built-in bases that hold something beside attributes; `object` for those that do not.
_BASES: dict[Any, Any] = {
    **{base: base for base in (dict, list, tuple, set, frozenset, collections.deque)},
    **{base: base for base in (collections.defaultdict, weakref.ref, functools.partial)},
    **{base: base for base in (property, staticmethod, classmethod, functools.cached_property)},
    **dict.fromkeys((object, int, float, complex, str, bytes, types.SimpleNamespace), object),
    **dict.fromkeys((collections.OrderedDict, typing.Generic, type(None)), object),
    **dict.fromkeys((BaseException, Exception, ValueError, RuntimeError, TypeError), BaseException),
    torch.autograd.Function.__mro__[2]: object,  # of C code: holds what is saved for backward
}


class IdentityKey:
    """An object as a key, equal to no other: users' may say that they are, as classes do whose
    metaclass compares names, and have no hash."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value  # kept, so that no other object gets its identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


Told = TypeVar("Told")
#: So many classes are remembered.
_MOST_CLASSES = 4096


def of_each_class(function: Callable[[Any], Told]) -> Callable[[Any], Told]:
    """Remembers what a function tells of classes, by their identities as `IdentityKey` does."""
    known: dict[int, tuple[Any, Told]] = {}

    @functools.wraps(function)
    def remembered(kind: Any) -> Told:
        try:
            return known[id(kind)][1]
        except KeyError:
            if len(known) >= _MOST_CLASSES:
                known.clear()
            known[id(kind)] = kind, (told := function(kind))
            return told

    return remembered


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance` by the object's real class: that asks an object's `__class__`, too."""
    return issubclass(type(value), kinds)


def but_constants(held: Iterable[Any]) -> list[Any]:
    """What a container holds; nothing where it is plain values, of which there may be thousands."""
    found = list(held)
    return [] if CONSTANTS.issuperset(map(type, found)) else found


def is_constant_class(kind: type) -> bool:
    """Whether objects of a class are taken for constant."""
    if kind in CONSTANTS:
        return True
    if not is_trusted_class(kind):
        # A user's class may keep anything beside what it has by its base, or have such a name.
        return kind.__name__ in _CONSTANT_NAMES and not kind.__flags__ & _HEAP_TYPE
    if kind.__name__ in _CONSTANT_NAMES:
        return True
    return issubclass(kind, _CONSTANT_BASES) and kind not in (np.object_, np.void)


def watch_class(
    guards: _C.Guards, kind: type, name: str, besides: frozenset[str] = frozenset()
) -> None:
    """Has guards hold as long as a class has what it has by a name, of its own or by its bases.

    Args:
        guards: these.
        kind: the class.
        name: by which it is asked.
        besides: special names that may change, as Python does not ask for them there.
    """
    for base in kind.__mro__[:-1]:
        guards.type(base, {name}, CLASS_NOISE | besides)


@of_each_class
def base_of(kind: Any) -> Any:
    """What objects hold beside attributes and slots: a container's base, `object` if nothing.

    None where they may hold what Python cannot see, as objects of C extensions do.
    """
    found: Any = object
    for base in kind.__mro__:
        if base in _BASES:
            found = _BASES[base] if found is object else found
        elif not _is_class_statement(base):
            return None
    return found


def _is_class_statement(kind: type) -> bool:
    """Whether a class was made by Python, and keeps nothing outside its dictionary and slots."""
    base = kind.__base__
    if base is None or not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _IMMUTABLE_TYPE:
        return False
    places = sum(1 for _ in _own_slots(kind)) + 2  # and for its dictionary and weak references
    return kind.__basicsize__ <= base.__basicsize__ + 8 * places


def _own_slots(kind: type) -> Iterator[tuple[str, Any]]:
    if kind.__flags__ & _HEAP_TYPE and not kind.__flags__ & _IMMUTABLE_TYPE:
        for name, value in kind.__dict__.items():
            if type(value) is types.MemberDescriptorType:
                yield name, value


@of_each_class
def slots_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Names and descriptors of all slots of a class and its bases."""
    return tuple(slot for base in kind.__mro__ for slot in _own_slots(base))


def in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in an object's slots; no code of its class is run."""
    kind: Any = type(value)
    for name, descriptor in slots_of(kind):
        try:
            yield name, descriptor.__get__(value)
        except AttributeError:  # nothing is in it
            continue


def own_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in an object's slots and its dictionary; no code of its class is run."""
    yield from in_slots(value)
    yield from (_C.instance_dict(value) or {}).items()


def is_behind_function(owner: object) -> bool:
    """Whether something is what an extension's function is bound to in place of an object: a
    pointer, or pybind11's record of the function."""
    kind = type(owner)
    return kind.__name__ == "PyCapsule" or is_of_pybind(kind)


def is_of_pybind(kind: type) -> bool:
    """Whether a class is one of those that pybind11 makes once for all extensions."""
    return kind.__module__ == "pybind11_builtins"


def is_foreign(value: Any) -> bool:
    """Whether something in a trusted module or class has been put there by other code.

    Bound methods of an object, too, as those of the generators behind `random` and `numpy.random`.
    """
    kind = type(value)
    if kind is types.FunctionType:
        return not is_trusted_code(value.__code__)
    if is_a(value, type):
        return not is_trusted_class(value)
    if kind is types.MethodType:
        return True
    if kind is types.BuiltinFunctionType:
        return not is_a(value.__self__, (types.ModuleType, type, type(None)))
    if is_a(value, types.ModuleType):
        return not is_trusted_name(value.__name__)
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_trusted_class(kind)


#: Memory that Python code writes into.
MEMORIES: tuple[type, ...] = (bytearray, array.array, memoryview)


def shared_attributes(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, where somebody else has that, too, as all objects
    of some classes have the same state; None where it is the object's alone, or it has none."""
    held = _C.instance_dict(value)
    return held if type(held) is dict and sys.getrefcount(held) > _REFERENCES else None


def _references() -> int:
    """How many `shared_attributes` counts where nobody else has it."""
    held = _C.instance_dict(types.SimpleNamespace())
    return sys.getrefcount(held) + 1  # its object's, which has gone


_REFERENCES = _references()
