"""What code says by its instructions: the functions inside it, the modules that it imports, whether
it catches errors."""

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


#: Errors that no operator on tensors raises.
_OTHERS_ERRORS = frozenset(
    {"AttributeError", "KeyError", "NameError", "StopIteration", "ImportError"}
    | {"ModuleNotFoundError", "OSError", "FileNotFoundError", "FloatingPointError"}
)


@functools.lru_cache(maxsize=1 << 13)
def catches(code: types.CodeType) -> bool:
    """Whether code goes on after an error that an operator on tensors may have raised."""
    if not code.co_exceptiontable:
        return False
    if "suppress" in code.co_names:  # contextlib's
        return True
    found = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for place, each in enumerate(found):
        if each.opname == "CHECK_EXC_MATCH":  # behind what is caught, one or several
            last = found[place - 1]
            count = last.arg or 0 if last.opname == "BUILD_TUPLE" else -1
            caught = [last] if count < 0 else found[place - 1 - count : place - 1]
            if not all(one.argval in _OTHERS_ERRORS for one in caught):
                return True
        elif each.opname == "PUSH_EXC_INFO" and found[place + 1].opname == "POP_TOP":
            return True  # whatever comes
    return False


@functools.lru_cache(maxsize=1 << 13)
def variables_set_by(code: types.CodeType) -> frozenset[str]:
    """Variables of functions around it that code sets."""
    return frozenset(
        each.argval
        for part in nested_codes(code)
        for each in dis.get_instructions(part)
        if each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval in part.co_freevars
    )


@functools.lru_cache(maxsize=1 << 13)
def compares_identities(code: types.CodeType) -> bool:
    """Whether code asks whether one object is another, or among others: not for constants such as
    None or the name of a field."""
    for part in nested_codes(code):
        found = [each for each in dis.get_instructions(part) if each.opname != "EXTENDED_ARG"]
        for place, each in enumerate(found):
            if each.opname == "IS_OP" and found[place - 1].opname != "LOAD_CONST":
                return True
            if each.opname == "CONTAINS_OP" and not _has_constant_on_the_left(found, place):
                return True
            if each.opname in _LOOKS_FOR and each.argval in ("index", "count", "remove"):
                return True
    return False


#: Instructions that get a method of an object, in any version.
_LOOKS_FOR = frozenset({"LOAD_METHOD", "LOAD_ATTR"})


def _has_constant_on_the_left(found: list[dis.Instruction], place: int) -> bool:
    """Of an instruction with two operands: whether the first is written there."""
    made = 0
    for before in range(place - 1, 0, -1):
        each = found[before]
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return False
        made += dis.stack_effect(
            each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        )
        if made == 1:
            return found[before - 1].opname == "LOAD_CONST"
    return False


@functools.lru_cache(maxsize=1 << 13)
def reads_first_argument(code: types.CodeType, behind: int = 0) -> bool:
    """Whether a function does anything with its first argument, or the first so many behind it."""
    if code.co_argcount <= behind:
        return True
    name = code.co_varnames[behind]
    return any(
        name in (each.argval if isinstance(each.argval, tuple) else (each.argval,))
        for part in nested_codes(code)
        for each in dis.get_instructions(part)
        if "LOAD" in each.opname
        and type(each.argval) in (str, tuple)
        and each.opname not in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")
    )
