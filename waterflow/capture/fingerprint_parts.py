"""What a fingerprint sees of objects and classes, and what of it is the user's."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from typing import Any

from waterflow.common.environment import is_library

#: What objects of classes that derive from these hold beside their attributes.
BUILT_IN_BASES: tuple[Any, ...] = (
    *(int, float, str, bytes, tuple, list, OrderedDict, dict, set, frozenset),
)

#: A flag of classes that are made at run time, as class statements do.
_HEAP_TYPE = 1 << 9

_EMPTY = "an empty cell"


def content_of(cell: Any) -> Any:
    """What a closure's cell holds; a text where nothing is assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _EMPTY


def is_installed(name: str) -> bool:
    """Whether a module that is not loaded belongs to an installed package."""
    package = name.partition(".")[0]
    if package in sys.modules:
        return is_library(package)
    return package in sys.stdlib_module_names


def is_foreign(value: Any) -> bool:
    """Whether something in a library's module has been put there by the user's code."""
    inner = getattr(value, "__module__", None)
    if isinstance(value, (types.FunctionType, type)) and isinstance(inner, str):
        return not is_library(inner)
    return False


def is_written_in_python(kind: type) -> bool:
    """Whether all state of such objects is where Python can see it."""
    own = [base for base in kind.__mro__ if base is not object and base not in BUILT_IN_BASES]
    return all(map(_is_class_statement, own))


def _is_class_statement(kind: type) -> bool:
    """Whether a class was made by Python, and keeps nothing outside its dictionary and slots."""
    module = sys.modules.get(kind.__module__)
    base = kind.__base__
    if module is None or base is None or not kind.__flags__ & _HEAP_TYPE:
        return False
    places = len(_own_slots(kind)) + 2  # and for its dictionary and weak references
    return _has_python_file(module) and kind.__basicsize__ <= base.__basicsize__ + 8 * places


def _has_python_file(module: types.ModuleType) -> bool:
    filename = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (filename or "").endswith((".py", ".pyc"))


def _own_slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def slots_of(kind: type) -> list[str]:
    """Names of all slots of a class and its bases."""
    return [name for base in kind.__mro__ for name in _own_slots(base)]
