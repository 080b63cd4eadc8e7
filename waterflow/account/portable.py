"""What objects that are there once for all are called in every process, and digests of code.

A structure (`structure`) has such objects by their addresses: modules, code, what trusted modules
define. A name here is equal in two processes only for what is the same in both: trusted code is
known by its name and text (its versions belong to whoever compares), other code by its text alone.
Whatever has no such name raises.
"""

from __future__ import annotations

import collections
import datetime
import enum
import hashlib
import logging
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from waterflow.account.class_parts import base_of, is_a, is_of_pybind, slots_of
from waterflow.account.trust import (
    is_everybodys,
    is_trusted_class,
    is_trusted_code,
    is_trusted_name,
)
from waterflow.allocator_ext import _C

#: So many digests of code are remembered.
_MOST_CODES = 20_000
_HEAP_TYPE = 1 << 9  # a flag of classes that are made at run time, as class statements do
_IMMUTABLE = 1 << 8  # of those that C code has made for good
_ATOMS = frozenset({type(None), bool, int, str, bytes, type(...), type(NotImplemented)})
_TORCH_ATOMS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
_CONTAINERS = (tuple, list, dict, collections.OrderedDict, types.MappingProxyType)
_HINTS: tuple[Any, ...] = (types.GenericAlias, types.UnionType, typing.TypeVar, typing._Final)  # type: ignore[attr-defined]
_DESCRIPTORS: tuple[Any, ...] = (
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType),
)
#: Operators of other namespaces may be anybody's.
_NAMESPACES = frozenset({"aten", "prim", "prims"})


class NotPortableError(Exception):
    """An object is not known to be the same in another process. Never a user's."""


def portable_name(value: Any) -> str:
    """What an object is called, for itself and its like in other processes.

    Raises:
        NotPortableError: nothing is known that would tell it from others there.
    """
    kind = type(value)
    if kind in _ATOMS or kind in _TORCH_ATOMS or issubclass(kind, _HINTS):
        return repr(value)
    if is_a(value, type):
        return _class(value)
    for kinds, name in _NAMES:
        if issubclass(kind, kinds):
            return name(value)
    return _object(value)


def code_digest(code: types.CodeType) -> str:
    """Equal for code that does the same: its instructions, names and constants.

    Lines and the file's name are left out, but not whether that makes it trusted.
    """
    known = _CODES.get(id(code))
    if known is None or known[0] is not code:
        if len(_CODES) >= _MOST_CODES:
            _CODES.clear()
        known = _CODES[id(code)] = code, _digest(code)
    return known[1]


_CODES: dict[int, tuple[types.CodeType, str]] = {}


def _digest(code: types.CodeType) -> str:
    parts = (
        *(code.co_name, code.co_qualname, code.co_argcount, code.co_posonlyargcount),
        *(code.co_kwonlyargcount, code.co_flags, code.co_names, code.co_varnames),
        *(code.co_freevars, code.co_cellvars, code.co_exceptiontable, code.co_code),
        *(is_trusted_code(code), _constant(code.co_consts)),
    )
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _constant(value: Any) -> Any:
    """A constant of code as a text; sets have no order."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return sorted(repr(_constant(part)) for part in value)
    return type(value).__name__, repr(value)


def _class(value: type) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    is_made = value.__flags__ & _HEAP_TYPE and not value.__flags__ & _IMMUTABLE
    is_fixed = not is_made and is_trusted_name(value.__module__)
    is_known = is_fixed or (is_trusted_class(value) and is_everybodys(value))
    if not (is_known or is_of_pybind(value)):
        raise NotPortableError(f"the class {name}")
    return f"class {name}"


def _module(value: types.ModuleType) -> str:
    name = value.__dict__.get("__name__")
    if isinstance(value, _OPERATOR_HOLDERS):
        return f"operators {name}"
    if not isinstance(name, str) or sys.modules.get(name) is not value:
        raise NotPortableError(f"a module of the name {name!r}")
    return f"module {name}"


_OPERATOR_HOLDERS: tuple[Any, ...] = (type(torch.ops),)


def _function(value: types.FunctionType) -> str:
    if not is_trusted_code(value.__code__):
        raise NotPortableError(f"the function {value.__qualname__}")
    defaults = _plain((value.__defaults__, value.__kwdefaults__))
    if defaults is None and not is_everybodys(value):
        raise NotPortableError(f"defaults of the function {value.__qualname__}")
    code = code_digest(value.__code__)
    return f"function {value.__module__}.{value.__qualname__} {code} {defaults!r}"


def _object(value: Any) -> str:
    """An object that a trusted class or module has: of plain values, which all count."""
    kind: Any = type(value)
    described = _plain(value)
    if described is None:
        is_seen = base_of(kind) is object and not slots_of(kind)
        described = _plain(_C.instance_dict(value) or {}) if is_seen else None
        described = described and (_class(kind), described)
    if described is None:
        raise NotPortableError(f"an object of {kind.__module__}.{kind.__qualname__}")
    return repr(described)


def _plain(value: Any) -> Any:
    """A description of a plain value, or of a container of such; None of any other."""
    kind = type(value)
    if kind in _ATOMS or kind in _TORCH_ATOMS or kind in (float, complex):
        return kind.__name__, repr(value)
    is_choice = issubclass(kind, enum.Enum) or "__entries" in vars(kind)  # of pybind11
    if is_choice and is_trusted_class(kind):
        return kind.__qualname__, value.name
    if kind in _CONTAINERS or _is_trusted_container(value, kind):
        items = value if issubclass(kind, (tuple, list)) else value.items()
        parts = [kind.__qualname__, *map(_plain, items)]
        return None if None in parts else parts
    if kind in (set, frozenset):
        members = [_plain(part) for part in value]
        return None if None in members else [kind.__name__, *sorted(map(repr, members))]
    return None


def _built_in(value: Any) -> str:
    owner = value.__self__
    if is_a(owner, types.ModuleType):
        where = owner.__dict__.get("__name__")
    elif is_a(owner, type):
        return f"built-in of the {_class(owner)} {value.__qualname__}"
    elif is_of_pybind(type(owner)):
        return f"built-in {value.__qualname__}"
    else:
        where = value.__module__
    if not _is_trusted_built_in(where):
        raise NotPortableError(f"{where}.{value.__qualname__}")
    return f"built-in {where}.{value.__qualname__}"


def _is_trusted_built_in(module: Any) -> bool:
    return module is None or is_trusted_name(module)


def _descriptor(value: Any) -> str:
    owner = value.__objclass__
    return f"descriptor {_class(owner)}.{value.__name__}"


def _operator(value: Any) -> str:
    namespace = getattr(value, "namespace", None) or str(value).partition(".")[0]
    if namespace not in _NAMESPACES:
        raise NotPortableError(f"the operator {value}")
    return f"operator {value}"


def _namespace(value: Any) -> str:
    if value.name not in _NAMESPACES:
        raise NotPortableError(f"operators of {value.name}")
    return f"operators of {value.name}"


def _is_trusted_container(value: Any, kind: Any) -> bool:
    own = issubclass(kind, (tuple, list, dict)) and is_trusted_class(kind)
    return own and not _C.instance_dict(value)


#: Of extensions, without public names: methods that pybind11 makes, and pointers.
_INSTANCE_METHOD, _CAPSULE = type(vars(torch._C.Node)["sourceRange"]), type(datetime.datetime_CAPI)


def _capsule(value: Any) -> str:
    return repr(value).partition(" at 0x")[0]


_NAMES: list[tuple[Any, Callable[[Any], str]]] = [
    (torch._ops._OpNamespace, _namespace),
    (types.ModuleType, _module),
    (types.CodeType, lambda code: f"code {code_digest(code)}"),
    (types.FunctionType, _function),
    (types.BuiltinFunctionType, _built_in),
    (_DESCRIPTORS, _descriptor),
    (_INSTANCE_METHOD, lambda method: f"method {method.__func__.__name__}"),
    (_CAPSULE, _capsule),
    (enum.property, lambda value: f"property of an enumeration {value.name}"),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), _operator),
    (logging.Logger, lambda logger: f"logger {logger.name}"),
    (np.ufunc, lambda function: f"ufunc {function.__name__}"),
]
