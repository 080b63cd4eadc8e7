"""Code that Python runs to import modules: it has no part in what a step computes.

Libraries import parts of themselves where they are first used, perhaps within a step. Python then
asks the finders on ``sys.meta_path``, some of which installed packages have put there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType

from waterflow.account.bytecode import nested_codes
from waterflow.account.code_names import Call


def without_importers(
    codes: Collection[CodeType], calls: Collection[Call]
) -> tuple[list[CodeType], list[Call]]:
    """Code and C calls (as `_C.Observer` gives them) without those of finders of modules."""
    finders = {code for kind in _finders() for code in _codes_of(kind)}
    seen = [code for code in codes if code not in finders]
    return seen, [call for call in calls if call[1] not in finders]


def _finders() -> Iterator[type]:
    for finder in list(sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        yield from kind.__mro__


@functools.lru_cache(maxsize=64)
def _codes_of(kind: type) -> tuple[CodeType, ...]:
    functions = [getattr(value, "__func__", value) for value in vars(kind).values()]
    own = [function for function in functions if type(function) is FunctionType]
    return tuple(code for function in own for code in nested_codes(function.__code__))
