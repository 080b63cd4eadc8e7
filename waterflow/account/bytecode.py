"""What code names: the functions inside it, the modules that it imports."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import types
from collections.abc import Iterator, Mapping
from typing import Any


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def imports_of(
    code: types.CodeType, namespace: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Full names of the modules that code imports when it runs, with the names taken from each."""
    for name, names in _written_imports(code):
        with contextlib.suppress(ImportError):  # relative, in no package: it raises there, too
            name = importlib.util.resolve_name(name, namespace.get("__package__") or "")
        yield name, names


@functools.lru_cache(maxsize=1 << 13)
def _written_imports(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The same by the names that the code has."""
    found = []
    before: list[Any] = [0, None]  # such code loads the level and the names first
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, names = before
            dots = "." * level if isinstance(level, int) else ""
            taken = names if isinstance(names, tuple) else ()
            found.append((dots + str(instruction.argval), taken))
        if instruction.opname != "EXTENDED_ARG":
            before = [before[-1], instruction.argval]
    return tuple(found)


@functools.lru_cache(maxsize=1 << 13)
def variables_set_by(code: types.CodeType) -> frozenset[str]:
    """Variables of functions around it that code sets."""
    return frozenset(
        each.argval
        for part in nested_codes(code)
        for each in dis.get_instructions(part)
        if each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in part.co_freevars
    )
