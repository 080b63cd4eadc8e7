"""What a job and its factory are made of, as one digest: equal digests, equal step graphs.

A cache of captures is only sound if whatever shapes a graph is part of its key. From the objects
given the walk follows attributes, containers, closures, defaults and the globals that functions
name, as far as code of the user's goes; installed packages stand for themselves by name (their
versions are in `environment`). Of tensors the layout counts: values do not enter a graph. What the
walk cannot see through (iterators, open files, objects of C extensions, code that reads files or
the environment) is a doubt, and with a doubt nothing should be cached.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import pathlib
import re
import sys
import types
import typing
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.account.bytecode import imports_of, nested_codes
from waterflow.account.class_parts import CLASS_NOISE
from waterflow.account.code_names import IMPORTERS
from waterflow.capture.fingerprint_parts import (
    BUILT_IN_BASES,
    content_of,
    is_foreign,
    is_installed,
    is_written_in_python,
    slots_of,
)
from waterflow.common.environment import is_library

#: Functions and attributes by which code reads what no walk can see.
_READS_OUTSIDE = {
    *("open", "read_text", "read_bytes", "load", "memmap", "fromfile", "loadtxt"),
    *("environ", "getenv", "argv", "eval", "exec", "globals", *IMPORTERS),
}

#: A data class's fields are told by its annotations and its functions.
_CLASS_NOISE = CLASS_NOISE | {"__dataclass_fields__"}

_ATOMS = (type(None), bool, int, str, bytes, complex, type(...), type(NotImplemented), range)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TYPE_HINTS = (types.GenericAlias, types.UnionType, typing.TypeVar)

#: Arrays larger than this are a doubt: too slow to read for a key.
_MAX_ARRAY_BYTES = 1 << 24


class Fingerprint:
    """Takes in values; `digest` is equal for equal ones, in every process."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._waiting: list[Any] = []  # in the order of their numbers; keeps them alive, too
        self._used_modules: set[tuple[str, frozenset[str]]] = set()
        self.doubts: list[str] = []

    def add(self, label: str, value: Any) -> None:
        """Takes in a value and all that it reaches."""
        self._write(f"[{label}]")
        described = len(self._waiting)
        self._value(value)
        self._describe_from(described)

    def add_patches(self) -> None:
        """Takes in what the user's code has put in the place of torch's own functions."""
        described = len(self._waiting)
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.nn.init):
            self._patches(owner)
        self._describe_from(described)

    def _describe_from(self, described: int) -> None:
        while described < len(self._waiting):
            self._write(f"\n{described} is ")
            self._describe(self._waiting[described])
            described += 1

    def digest(self) -> str:
        """The digest of all that was taken in."""
        return self._hash.hexdigest()

    def _write(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def _doubt(self, what: str) -> None:
        self.doubts.append(what)
        self._write(f"doubt {what};")

    # Values that are written where they stand

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS or kind in _TORCH_ATOMS:
            self._write(f"{kind.__name__} {value!r};")
        elif kind is float:
            self._write(f"float {value.hex()};")
        elif kind in (list, tuple, torch.Size, types.MappingProxyType, dict, OrderedDict):
            self._container(value)
        elif kind in (set, frozenset):
            self._set(value)
        elif kind is slice:
            self._container((value.start, value.stop, value.step))
        elif kind in _TYPE_HINTS or kind.__module__ == "typing":
            self._write(f"hint {value!r};")
        else:
            self._reference(value)

    def _container(self, value: Any) -> None:
        items = value.items() if isinstance(value, Mapping) else value
        self._write(f"{type(value).__name__} {len(value)}(")
        for item in items:
            if isinstance(value, Mapping):
                self._value(item[0])
                self._value(item[1])
            else:
                self._value(item)
        self._write(")")

    def _set(self, value: Any) -> None:
        plain = [item for item in value if type(item) in (*_ATOMS, *_TORCH_ATOMS, float)]
        if len(plain) < len(value):
            self._doubt("a set of objects")
        texts = sorted(f"{type(item).__name__} {item!r}" for item in plain)
        self._write(f"{type(value).__name__} {texts};")

    def _reference(self, value: Any) -> None:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._waiting)
            self._waiting.append(value)
        self._write(f"#{self._numbers[id(value)]};")

    # Objects, described once

    def _describe(self, value: Any) -> None:
        for kinds, describe in _DESCRIBERS:
            if isinstance(value, kinds):
                describe(self, value)
                return
        self._object(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        kind = "fake" if isinstance(tensor, FakeTensor) else type(tensor).__qualname__
        kind = "plain" if kind in ("fake", "Tensor", "Parameter") else kind
        self._write(
            f"{kind} tensor {tensor.dtype} {tuple(tensor.shape)} {_stride(tensor)} {tensor.layout} "
            f"{tensor.device.type} {tensor.requires_grad} {isinstance(tensor, torch.nn.Parameter)}"
        )
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            self._value(list((getattr(tensor, hooks, None) or {}).values()))

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._write(f"array {array.dtype} {array.shape}")
        if array.dtype.hasobject or array.nbytes > _MAX_ARRAY_BYTES:
            self._doubt("an array of objects, or a large one")
        else:
            self._write(hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest())

    def _number(self, number: np.generic) -> None:
        self._write(f"{number.dtype} {number!r}")

    def _function(self, function: types.FunctionType) -> None:
        self._write(f"function {function.__module__}.{function.__qualname__} ")
        if is_library(str(function.__globals__.get("__name__"))):
            self._library_function(function)
            return
        self._code(function.__code__)
        self._value(function.__defaults__)
        self._value(function.__kwdefaults__)
        self._value(vars(function))
        for cell in function.__closure__ or ():
            self._value(content_of(cell))
        self._globals(function)

    def _library_function(self, function: types.FunctionType) -> None:
        """Its code is known by a version; functions of the user's may hang on to it, as wrapped."""
        self._value(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            self._value(content_of(cell))

    def _code(self, code: types.CodeType) -> None:
        self._write(
            f"code {code.co_name} {code.co_argcount} {code.co_posonlyargcount} "
            f"{code.co_kwonlyargcount} {code.co_flags} {code.co_names} {code.co_varnames} "
            f"{code.co_freevars} {code.co_cellvars} {code.co_exceptiontable!r} "
        )
        self._write(hashlib.sha256(code.co_code).hexdigest())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._value(constant)

    def _globals(self, function: types.FunctionType) -> None:
        codes = list(nested_codes(function.__code__))
        names = sorted({name for code in codes for name in code.co_names})
        for name in _READS_OUTSIDE.intersection(names):
            self._doubt(f"{function.__qualname__}() uses {name!r}, which may read anything")
        used = frozenset(names)
        for name in names:
            if name in function.__globals__:
                self._write(f"global {name} ")
                self._global(function.__globals__[name], used)
        for code in codes:
            for module, taken in imports_of(code, function.__globals__):
                self._import(module, taken, used)

    def _global(self, value: Any, names: frozenset[str]) -> None:
        self._value(value)
        if isinstance(value, types.ModuleType):
            self._module_use(value, names)

    def _import(self, name: str, taken: tuple[str, ...], names: frozenset[str]) -> None:
        self._write(f"import {name};")
        module = sys.modules.get(name)
        if module is not None:
            self._module_use(module, names)
            missing = set() if is_library(name) else set(taken) - vars(module).keys() - {"*"}
        else:
            missing = set() if is_installed(name) else {name}
        for absent in sorted(missing):
            self._doubt(f"a function imports {absent!r} when it is called")

    def _module_use(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What a function may take from a module: whatever it has of the names that are used."""
        if (module.__name__, names) in self._used_modules:
            return
        self._used_modules.add((module.__name__, names))
        of_library = is_library(module.__name__)
        for name in sorted(names):
            value = vars(module).get(name)
            if value is not None and (not of_library or is_foreign(value)):
                self._write(f"{module.__name__}.{name} ")
                self._global(value, names)

    def _class(self, kind: type) -> None:
        self._write(f"class {kind.__module__}.{kind.__qualname__} ")
        if is_library(kind.__module__):
            for base in kind.__mro__:
                self._patches(base)
            return
        self._value(type(kind))
        self._value(kind.__mro__[1:])
        for name, value in vars(kind).items():
            if name not in _CLASS_NOISE and not isinstance(value, types.GetSetDescriptorType):
                self._write(f".{name} ")
                self._value(value)

    def _patches(self, owner: Any) -> None:
        """Functions and classes that the user's code has put into a library's class or module."""
        for name, value in list(vars(owner).items()):
            if is_foreign(value):
                self._write(f"patched {name} ")
                self._value(value)

    def _module(self, module: types.ModuleType) -> None:
        self._write(f"module {module.__name__}")

    def _method(self, method: types.MethodType) -> None:
        self._container((method.__func__, method.__self__))

    def _builtin(self, function: Any) -> None:
        self._write(f"builtin {getattr(function, '__module__', '')}.{function.__qualname__} ")
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, types.ModuleType):
            self._value(owner)

    def _partial(self, partial: functools.partial[Any]) -> None:
        self._container((partial.func, partial.args, partial.keywords, vars(partial)))

    def _wrapper(self, wrapper: staticmethod[Any, Any] | classmethod[Any, Any, Any]) -> None:
        self._container((type(wrapper).__name__, wrapper.__func__))

    def _property(self, prop: property) -> None:
        self._container((prop.fget, prop.fset, prop.fdel))

    def _member(self, member: enum.Enum) -> None:
        self._container((type(member), member.name, member.value))

    def _weak(self, reference: weakref.ref[Any]) -> None:
        self._container((type(reference).__name__, reference()))

    def _text(self, value: Any) -> None:
        self._write(f"{type(value).__name__} {value}")

    def _pattern(self, pattern: re.Pattern[Any]) -> None:
        self._write(f"pattern {pattern.pattern!r} {pattern.flags}")

    def _name_only(self, value: Any) -> None:
        """Objects whose state has no say in what a step consists of: loggers, random streams."""
        self._write(f"{type(value).__qualname__} {getattr(value, 'name', '')}")

    def _namespace(self, value: types.SimpleNamespace) -> None:
        self._container((type(value), vars(value)))

    def _default_dictionary(self, value: defaultdict[Any, Any]) -> None:
        self._container((type(value), value.default_factory, dict(value)))

    def _object(self, value: Any) -> None:
        """An object whose state is its attributes, and what it holds if it is a container."""
        kind = type(value)
        self._write("object of ")
        self._value(kind)
        if not is_written_in_python(kind):
            self._doubt(f"an object of {kind.__module__}.{kind.__qualname__}")
            return
        for base in BUILT_IN_BASES:
            if isinstance(value, base):
                self._value(base(value))
        for name in slots_of(kind):
            self._value((name, getattr(value, name, None)))
        for name, attribute in getattr(value, "__dict__", {}).items():
            self._write(f".{name} ")
            if "hooks" in name and isinstance(
                attribute, dict
            ):  # keys count all hooks there ever were
                attribute = list(attribute.values())
            self._value(attribute)


_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)

#: How to describe what; the first kind that fits counts.
_DESCRIBERS: list[tuple[Any, Callable[[Fingerprint, Any], None]]] = [
    (torch.Tensor, Fingerprint._tensor),
    (type, Fingerprint._class),
    (types.FunctionType, Fingerprint._function),
    (types.MethodType, Fingerprint._method),
    (types.ModuleType, Fingerprint._module),
    (_BUILTINS, Fingerprint._builtin),
    (functools.partial, Fingerprint._partial),
    ((staticmethod, classmethod), Fingerprint._wrapper),
    (property, Fingerprint._property),
    (enum.Enum, Fingerprint._member),
    (weakref.ref, Fingerprint._weak),
    (np.ndarray, Fingerprint._array),
    (np.generic, Fingerprint._number),
    (np.dtype, Fingerprint._text),
    (pathlib.PurePath, Fingerprint._text),
    (re.Pattern, Fingerprint._pattern),
    ((logging.Logger, torch.Generator), Fingerprint._name_only),
    (defaultdict, Fingerprint._default_dictionary),
    (types.SimpleNamespace, Fingerprint._namespace),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), Fingerprint._text),
]


def _stride(tensor: torch.Tensor) -> Any:
    return tensor.stride() if tensor.layout == torch.strided else None
