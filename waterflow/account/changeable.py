"""Whether objects of a class can be changed in some way that bytecode tells (`stores.Change`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from waterflow.account.class_parts import is_a
from waterflow.account.holders import CONTAINERS, MEMORIES, attributes_of, has_lock, parts_of
from waterflow.account.origins import Origin
from waterflow.account.trust import (
    Packages,
    is_own_class,
    is_package_class,
    is_trusted_class,
    is_trusted_code,
)

#: Methods by which arrays are changed that other objects have, too.
_OF_ARRAYS = frozenset({"fill", "put", "sort", "partition", "byteswap", "resize", "setflags"})
#: So much of a package is looked at from one of its objects.
_MOST_PARTS = 1_000
_IN_PLACE = {"|=": "__ior__", "&=": "__iand__", "-=": "__isub__", "^=": "__ixor__"}


class Way(NamedTuple):
    """How something is changed, as of a `Change`; `code`: whose variable it is."""

    how: str
    name: str
    code: CodeType | None


def may_be_changed(kind: type, way: Way, origin: Origin, packages: Packages = Packages.ALL) -> bool:
    """Whether objects of a class can be changed in this way; `packages`: whose code is looked at by
    itself."""
    if way.how == "call":
        return packages is Packages.NONE and is_package_class(kind)
    if issubclass(kind, MEMORIES):
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
    return packages is not Packages.NONE or not packages.passes_file(found.__code__.co_filename)


def parts_of_package(value: Any) -> Iterator[Any]:
    """What a call of an object of a package may change, which is passed by: the object, and what it
    holds of packages and in containers; of modules that have parameters, which only compute,
    nothing."""
    waiting, seen = deque([value]), set[int]()
    while waiting and len(seen) < _MOST_PARTS:
        value = waiting.popleft()
        if id(value) in seen or not (is_package_class(type(value)) or is_a(value, CONTAINERS)):
            continue
        seen.add(id(value))
        if is_a(value, nn.Module) and next(value.parameters(), None) is not None:
            continue
        if not is_a(value, (tuple, frozenset)):
            yield value
        waiting += parts_of(value) if is_a(value, CONTAINERS) else _held_by(value)


def _held_by(value: Any) -> list[Any]:
    return [held for _, held in attributes_of(value)]


def is_looked_after(value: Any) -> bool:
    """Whether an object has a lock, so that its maker sees to it that threads share it, or is this
    library's own, or a class of a trusted library's, which users do not set."""
    if is_own_class(type(value)):
        return True
    if is_a(value, type):
        return is_trusted_class(value)
    return has_lock(value)


def has_attribute(value: Any, name: str) -> bool:
    """Whether an object has an attribute, by itself or by its class; "*": any."""
    own = any(name == each for each, _ in attributes_of(value))
    return own or name == "*" or any(name in vars(kind) for kind in type(value).__mro__)


def memory_of(value: Any) -> Iterator[int]:
    """What else stands for an array, as it is its memory."""
    if is_a(value, torch.Tensor) and value.layout is torch.strided:
        yield value.untyped_storage()._cdata
    elif is_a(value, np.ndarray) and value.base is not None:
        yield id(value.base)
