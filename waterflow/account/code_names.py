"""Which attributes and globals code can read, by its bytecode.

An attribute can be read by code that has its name, or by `getattr` and the like with a name that is
made when it runs. Names that are constants are found; where one is not, any attribute may be read.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import inspect
import operator
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from waterflow.account.bytecode import nested_codes
from waterflow.account.trust import is_trusted_code

#: What `_C.Observer.calls` gives: a C function, the code that called it, and the line.
Call = tuple[Any, CodeType, int]

_GLOBAL_OPCODES = frozenset(
    dis.opmap[name]
    for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")
    if name in dis.opmap
)
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_STORES = frozenset(
    dis.opmap[name] for name in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
)
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
#: The instruction before which the arguments of a call are on the stack.
_TAKES_ARGUMENTS = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
#: Calls that read attributes by names given to them.
_READ_BY_NAME = ("getattr", "hasattr")
#: Functions of the standard library that read all attributes of what they are given.
_READERS = frozenset(
    {
        # Not `__replace__`, which all data classes have from Python 3.13 on: who calls it counts.
        *((copy.__file__, name) for name in ("copy", "deepcopy", "_reconstruct", "replace")),
        *((dataclasses.__file__, name) for name in ("_asdict_inner", "_astuple_inner")),
        *((dataclasses.__file__, name) for name in ("asdict", "astuple", "replace")),
        *((inspect.__file__, name) for name in ("getmembers", "_getmembers", "getattr_static")),
    }
)
_READER_FUNCTIONS = (
    *(getattr, hasattr, vars, dir, operator.attrgetter, operator.methodcaller),
    *(pickle.dump, pickle.dumps),
)
#: What gives all attributes at once.
_READ_ALL = (
    *("__dict__", "vars", "dir", "__getstate__", "getmembers", "attrgetter", "methodcaller"),
    *("dump", "dumps"),
)
#: Names that read by names given to them, or everything, and are no functions that anybody calls.
_READ_UNSEEN = frozenset({"__dict__", "__getstate__", "__getattribute__", "__globals__"})
#: Methods that fill in forms.
_FORMATS = frozenset({"format", "format_map", "vformat"})
_CALLABLES = ("getattr", "hasattr", "vars", "dir")
#: Functions that give a module by its name.
IMPORTERS = frozenset({"import_module", "__import__"})


class CodeNames(NamedTuple):
    """What code, with the functions inside it, names; `stored`: attributes and globals that it sets
    or deletes; `positions`: whether it has patterns of attributes that only a class names
    (`__match_args__`)."""

    names: frozenset[str]
    global_names: frozenset[str]
    stored: frozenset[str]
    imports: bool
    positions: bool


#: Attributes in the fields of a format.
_OF_FIELDS = re.compile(r"\.([^\W\d]\w*)")

_KNOWN: dict[int, tuple[CodeType, CodeNames]] = {}


def code_names(code: CodeType) -> CodeNames:
    """The names in code and in the functions inside it."""
    known = _KNOWN.get(id(code))
    if known is None or known[0] is not code:
        known = _KNOWN[id(code)] = code, _scan(code)
    return known[1]


def _scan(code: CodeType) -> CodeNames:
    names: set[str] = set()
    global_names: set[str] = set()
    stored: set[str] = set()
    imports = positions = False
    for part in nested_codes(code):
        names.update(part.co_names)
        for opcode, argument in _instructions(part.co_code):
            if opcode in _GLOBAL_OPCODES:
                name = part.co_names[argument >> 1 if opcode == _LOAD_GLOBAL else argument]
                if name.isidentifier():  # others are no user's: pytest puts some into asserts
                    global_names.add(name)
            if opcode in _STORES:
                stored.add(part.co_names[argument])
            imports = imports or opcode == _IMPORT_NAME
            positions = positions or (opcode == _MATCH_CLASS and argument > 0)
    sets = frozenset(names), frozenset(global_names), frozenset(stored)
    return CodeNames(*sets, imports, positions)


def _instructions(text: bytes) -> Iterator[tuple[int, int]]:
    extended = 0
    for opcode, argument in zip(text[::2], text[1::2], strict=True):
        argument |= extended
        if opcode == dis.EXTENDED_ARG:
            extended = argument << 8
            continue
        extended = 0
        yield opcode, argument


def names_in(
    codes: Iterable[CodeType],
    calls: Collection[Call] = (),
    copied: bool = True,
    computed: bool = True,
) -> frozenset[str] | None:
    """Names of the attributes that executed code can read; None if it can read any.

    Args:
        codes: the code that was executed.
        calls: the C functions that it called, as `_C.Observer.calls` gives them.
        copied: whether attributes count that are only copied along with their object. Nothing of
            them is executed but for the methods of the copy protocol.
        computed: whether names count that code computes, and so may be any.
    """
    callers = {id(code) for function, code, _ in calls if reads_by_name(function)}
    names: set[str] = set()
    for code in codes:
        names |= code_names(code).names
        if computed and copied and (code.co_filename, code.co_qualname) in _READERS:
            return None
        if is_trusted_code(code):
            continue
        if computed and code_names(code).positions:
            return None
        for part in nested_codes(code):
            names.update(_constants(part.co_consts))
            if computed and _reads_any(part, called=not calls or id(part) in callers):
                return None
    return frozenset(names)


def reads_by_name(function: Any) -> bool:
    """Whether a function reads attributes by names that it is given."""
    return any(function is reader for reader in _READER_FUNCTIONS)


def _constants(constants: Iterable[Any]) -> Iterator[str]:
    """Texts that may be names given to getattr, and names in patterns of match statements."""
    for value in constants:
        if isinstance(value, str):
            if value.isidentifier():
                yield value
            elif "{" in value:
                yield from _OF_FIELDS.findall(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _constants(value)


def _reads_any(code: CodeType, called: bool) -> bool:
    if not _FORMATS.isdisjoint(code.co_names) and _formats_what_is_given(code):
        return True
    if not _READ_UNSEEN.isdisjoint(code.co_names):
        return True
    if set(code.co_names).isdisjoint((*_READ_BY_NAME, *_READ_ALL)):
        return False
    if _hands_on(code):  # to a function of C's, which calls it: nobody sees that
        return True
    if not called:
        return False
    if set(code.co_names).intersection(_READ_ALL):
        return True
    found = list(dis.get_instructions(code))
    uses = [i for i, each in enumerate(found) if each.argval in _READ_BY_NAME]
    return not all(_name_is_constant(found, i) for i in uses)


@functools.lru_cache(maxsize=4096)
def _formats_what_is_given(code: CodeType) -> bool:
    """Whether code fills in a form that is not written there, whose fields may be attributes."""
    found = list(dis.get_instructions(code))
    return any(
        each.argval in _FORMATS
        and each.opname in ("LOAD_METHOD", "LOAD_ATTR")
        and found[i - 1].opname != "LOAD_CONST"
        for i, each in enumerate(found)
    )


@functools.lru_cache(maxsize=4096)
def _hands_on(code: CodeType) -> bool:
    """Whether code gets a function that reads by name, and does not call it there."""
    found = list(dis.get_instructions(code))
    return any(_is_handed_on(found, i) for i, each in enumerate(found) if each.argval in _CALLABLES)


def _is_handed_on(found: Sequence[dis.Instruction], index: int) -> bool:
    """Whether the instruction gets a function in order to do something else than to call it."""
    each, before = found[index], found[index - 1].opname if index else ""
    if each.opname == "LOAD_GLOBAL":
        return not (each.arg or 0) & 1  # as the lowest bit says
    return each.opname == "LOAD_NAME" and before != "PUSH_NULL"


def _name_is_constant(found: Sequence[dis.Instruction], start: int) -> bool:
    """Whether the second argument of the call that instruction ``start`` begins is a constant."""
    depth, second = 0, None
    for each in found[start + 1 :]:
        if each.opname == _TAKES_ARGUMENTS and depth == each.arg:
            return second is not None and second.opname == "LOAD_CONST"
        if "JUMP" in each.opname or each.opname in ("RETURN_VALUE", "CALL_FUNCTION_EX"):
            return False
        before, depth = depth, depth + dis.stack_effect(each.opcode, each.arg)
        if depth == 2 or before < 2 < depth:  # what it leaves there is the second argument
            second = each
    return False
