"""Whether objects of a class can be changed in some way that bytecode tells (`stores.Change`)."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from waterflow.account.bytecode import nested_codes
from waterflow.account.changing_names import READING, TAKING
from waterflow.account.class_parts import is_a, of_each_class, shared_attributes
from waterflow.account.holders import (
    CONTAINERS,
    MAKERS,
    MEMORIES,
    attributes_of,
    functions_of,
    has_lock,
)
from waterflow.account.origins import Origin
from waterflow.account.stores import stores_of
from waterflow.account.trust import (
    Packages,
    is_own_class,
    is_package_class,
    is_trusted_class,
    is_trusted_code,
)

#: Methods by which arrays are changed that other objects have, too.
_OF_ARRAYS = frozenset(
    {"fill", "put", "sort", "partition", "byteswap", "resize", "setflags", "setfield"}
)
_IN_PLACE = {"|=": "__ior__", "&=": "__iand__", "-=": "__isub__", "^=": "__ixor__"}
#: Whoever uses one moves it: by a method that was bound early, an argument, a sampler.
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
#: What draws from these draws from a stream that all jobs have in common anyway.
OF_THE_PROCESS = {
    *(id(random._inst), id(np.random.mtrand._rand)),  # type: ignore[attr-defined]
    *map(id, (torch.default_generator, *torch.cuda.default_generators)),
}
#: Observers note what they see in either mode.
_OBSERVERS = ("torch.ao.", "torch.quantization.")


class Way(NamedTuple):
    """How something is changed, as of a `Change`; `code`: whose variable it is."""

    how: str
    name: str
    code: CodeType | None


def may_be_changed(kind: type, way: Way, origin: Origin, packages: Packages = Packages.ALL) -> bool:
    """Whether objects of a class can be changed in this way; `packages`: whose code is looked at by
    itself."""
    if way.how == "call":
        if packages is Packages.NONE:
            return is_package_class(kind)
        is_known = way.name in READING or packages.passes_name(kind.__dict__.get("__module__"))
        return is_compiled(kind) and not is_known
    if issubclass(kind, MEMORIES):
        if issubclass(kind, torch.Tensor) and origin.kind not in ("held", "below"):
            return False  # of batches: `data_memory`
        arrays = issubclass(kind, np.ndarray) and way.name in _OF_ARRAYS
        named = way.name.endswith("_") or way.name == "out" or arrays
        return way.how in ("item", "operator", "attribute") or named
    if way.name in ("out", "generator"):
        return issubclass(kind, (list, bytearray) if way.name == "out" else torch.Generator)
    if issubclass(kind, ContextVar):  # each job has a context of its own
        return False
    if way.name in TAKING:
        return is_queue(kind)
    if way.name == "*" and way.how == "method":
        return issubclass(kind, CONTAINERS) and not issubclass(kind, (tuple, frozenset))
    if way.how == "attribute":
        if issubclass(kind, (type, FunctionType)):  # nobody sets those of what he was handed
            known = ("held", "class", "parameter") if issubclass(kind, type) else ("held",)
            return origin.kind in known
        return not issubclass(kind, CONTAINERS) or bool(kind.__dictoffset__)
    method = way.name
    if way.how == "item":
        method = "__setitem__"
    elif way.how == "operator":
        method = _IN_PLACE.get(way.name, "__iadd__")
    return callable(getattr(kind, method, None)) and not _is_users(kind, method, packages)


def _is_users(kind: type, name: str, packages: Packages) -> bool:
    """Whether a method is the user's own Python, which is looked at by itself."""
    found = getattr(kind, name)
    if type(found) is not FunctionType or is_trusted_code(found.__code__):
        return False
    return not packages.passes_file(found.__code__.co_filename)


def is_queue(kind: type) -> bool:
    """Whether something is taken from objects of a class by what only looks into dictionaries."""
    return all(callable(getattr(kind, name, None)) for name in ("put", "get"))


def changes_when_called(value: Any) -> bool:
    """Whether an object of a package that is passed by may change when it is called, or a method of
    it: where some method changes it, or what it holds, or is no Python. Modules that have
    parameters only compute."""
    if is_a(value, nn.Module) and next(value.parameters(), None) is not None:
        return False
    return any(map(_changes_its_objects, type(value).__mro__))


def is_compiled(kind: type) -> bool:
    """Whether a class, or one that it is derived from, is of a package and has methods that are no
    Python, so that nobody can look at what they do."""
    return any(_has_compiled_methods(each) and is_package_class(each) for each in kind.__mro__)


@of_each_class
def _has_compiled_methods(kind: type) -> bool:
    return any(type(part) is MethodDescriptorType for part in vars(kind).values())


@of_each_class
def _changes_its_objects(kind: type) -> bool:
    if not is_package_class(kind):
        return False
    if _has_compiled_methods(kind):
        return True
    methods = {
        function.__code__
        for part in vars(kind).values()
        for function in functions_of(part)
        if not (function.__code__.co_name in MAKERS or is_trusted_code(function.__code__))
    }
    return any(_changes_self(code) for method in methods for code in nested_codes(method))


def _changes_self(code: CodeType) -> bool:
    """Whether a method changes what is its own: its first parameter, or what is held by a name."""
    own = code.co_varnames[:1]
    changes = (
        change
        for change in stores_of(code).changes
        if not (change.how == "cell" or change.name in TAKING)
    )
    origins = (origin for change in changes for origin in change.origins)
    return any(o.kind in ("held", "below") or o.name in own for o in origins)


def is_looked_after(value: Any) -> bool:
    """Whether an object has a lock, so that its maker sees to it that threads share it, or is this
    library's own, or a class of a trusted library's, which users do not set."""
    if is_own_class(type(value)):
        return True
    if is_a(value, type):
        return is_trusted_class(value)
    return has_lock(value) and not is_a(value, queue.Queue)  # whose items are whoever's comes first


def has_attribute(value: Any, name: str) -> bool:
    """Whether an object, or a class, has an attribute, by itself or by its class; "*": any."""
    own = any(name == each for each, _ in attributes_of(value))
    kinds = (*(value.__mro__ if is_a(value, type) else ()), *type(value).__mro__)
    return own or name == "*" or any(name in vars(kind) for kind in kinds)


def moved_by_use(value: Any) -> Iterator[Any]:
    """What is changed by whoever uses an object, whatever the code says that does so: a generator
    of random numbers, buffers that a module of torch's writes to when it is called (running
    statistics, the vectors of a spectral norm)."""
    if is_a(value, _GENERATORS):
        if id(value) not in OF_THE_PROCESS:
            yield value
    elif is_a(value, nn.Module) and _writes_to_buffers(value):
        yield from (buffer for buffer in vars(value)["_buffers"].values() if buffer is not None)


def _writes_to_buffers(module: nn.Module) -> bool:
    """Whether torch's own code may do so; what a user's `forward` does, its bytecode tells."""
    kind, held = type(module), vars(module)
    if type(held.get("_buffers")) is not dict or not held["_buffers"]:
        return False
    if not (held.get("training") or kind.__module__.startswith(_OBSERVERS)):
        return False
    return is_a(module, _NormBase) or _is_called_as_torchs(kind)


@of_each_class
def _is_called_as_torchs(kind: type) -> bool:
    forward = getattr(kind, "forward", None)
    return type(forward) is FunctionType and is_trusted_code(forward.__code__)


def keys_of(value: Any) -> Iterator[int]:
    """What stands for an object: its identity, and what `memory_of` says."""
    yield id(value)
    yield from memory_of(value)


def memory_of(value: Any) -> Iterator[int]:
    """What else stands for an object: an array's memory, attributes that others have, too."""
    if (shared := shared_attributes(value)) is not None:
        yield id(shared)
    if is_a(value, torch.Tensor) and value.layout is torch.strided:
        yield value.untyped_storage()._cdata
    elif is_a(value, np.ndarray) and value.base is not None:
        yield id(value.base)
        if is_a(value.base, torch.Tensor):
            yield from memory_of(value.base)
