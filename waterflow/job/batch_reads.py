"""Which parts of its batch a loss can read at all, by its bytecode.

A path or an identifier beside the tensors would make every batch a shape of its own. Whether a step
reads it cannot be seen while it runs: containers and texts are read in C, too. But a loss that uses
its batch for nothing but ``batch["image"]`` and ``image, label, path = batch`` hands the batch to
nobody, so what it does not name there, or names and does not use, is out of its reach.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

#: Functions that read local variables, the batch among them, by names that no code shows.
_READERS = (locals, vars, dir, eval, exec)
_READER_IDS = frozenset(map(id, _READERS))
_READER_NAMES = frozenset({reader.__name__ for reader in _READERS} | {"f_locals", "tb_frame"})
#: Instructions that do nothing themselves.
_EMPTY = ("NOP", "EXTENDED_ARG")
_GENERATORS = 0x20 | 0x80 | 0x200  # inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class BatchReads:
    """What a loss reads of its batch.

    Attributes:
        items: constants by which the batch is subscripted.
        unpackings: for each time that it is unpacked, which of the values are used.
    """

    items: frozenset[str | int]
    unpackings: frozenset[tuple[bool, ...]]

    def unread(self, batch: Any) -> frozenset[Any]:
        """Keys or positions whose values the loss cannot reach; of plain containers only."""
        if type(batch) is dict:
            plain = all(type(key) in (str, int) for key in batch)
            if not plain or self.unpackings:  # unpacked, a mapping gives its keys
                return frozenset()
            return frozenset(batch) - self.items
        if type(batch) not in (list, tuple):
            return frozenset()
        count = len(batch)
        read = {item % count for item in self.items if type(item) is int and -count <= item < count}
        for used in self.unpackings:
            if len(used) != count:  # an error, which is the step's to raise
                return frozenset()
            read.update(position for position, is_used in enumerate(used) if is_used)
        return frozenset(range(count)) - read


def reads_of(loss: Callable[..., Any], position: int = 1) -> BatchReads | None:
    """What a loss reads of its batch; None where it may read all of it.

    Args:
        loss: the user's function.
        position: of the batch among its arguments.
    """
    if type(loss) is MethodType:
        loss, position = loss.__func__, position + 1
    if type(loss) is not FunctionType:
        return None
    if not _READER_IDS.isdisjoint(map(id, map(loss.__globals__.get, loss.__code__.co_names))):
        return None
    return _reads(loss.__code__, position)


@functools.lru_cache(maxsize=1024)
def _reads(code: CodeType, position: int) -> BatchReads | None:
    if code.co_argcount <= position or code.co_flags & _GENERATORS:
        return None
    batch = code.co_varnames[position]
    if batch in code.co_cellvars or _READER_NAMES.intersection(code.co_names):
        return None
    return _Scan(code, batch).result()


class _Scan:
    """Goes through the uses of one local variable."""

    def __init__(self, code: CodeType, batch: str) -> None:
        self._code = code
        self._batch = batch
        instructions = dis.get_instructions(code)
        self._found = [each for each in instructions if each.opname not in _EMPTY]
        self._loaded = {
            name for each in self._found if _loads(each) for name in _locals(each)
        } | set(code.co_cellvars)

    def result(self) -> BatchReads | None:
        items: set[str | int] = set()
        unpackings: set[tuple[bool, ...]] = set()
        for index, each in enumerate(self._found):
            if not _loads(each) or self._batch not in _locals(each):
                continue
            *under, top = _locals(each)
            following = self._found[index + 1 : index + 3]
            if self._batch in under or top != self._batch:
                return None
            if _is_subscript(following):
                items.add(following[0].argval)
                continue
            used = self._unpacked(index + 1)
            if used is None:
                return None
            unpackings.add(used)
        return BatchReads(frozenset(items), frozenset(unpackings))

    def _unpacked(self, start: int) -> tuple[bool, ...] | None:
        """Which of the values that an instruction unpacks are used; None where it does not."""
        if self._found[start].opname != "UNPACK_SEQUENCE":
            return None
        wanted = self._found[start].arg or 0
        names: list[str] = []
        for each in self._found[start + 1 :]:
            if len(names) >= wanted or not each.opname.startswith("STORE_FAST"):
                break
            if _loads(each):
                return None
            names += _locals(each)
        if len(names) != wanted:
            return None
        return tuple(name in self._loaded for name in names)


def _locals(each: dis.Instruction) -> Sequence[str]:
    """The local variables that an instruction names, in the order in which it takes them."""
    if each.opcode not in dis.haslocal:
        return ()
    return each.argval if isinstance(each.argval, tuple) else (each.argval,)


def _loads(each: dis.Instruction) -> bool:
    """Whether an instruction may read a local variable: all that do not only store or delete."""
    return each.opcode in dis.haslocal and each.opname not in (
        "STORE_FAST",
        "STORE_FAST_STORE_FAST",
        "DELETE_FAST",
    )


def _is_subscript(following: Sequence[dis.Instruction]) -> bool:
    if len(following) < 2 or type(following[0].argval) not in (str, int):
        return False
    constant, subscript = following
    if constant.opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    return subscript.opname == "BINARY_SUBSCR" or (
        subscript.opname == "BINARY_OP" and subscript.argrepr == "[]"
    )
