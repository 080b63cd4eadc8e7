"""Warnings that point at the user's own line, and are shown as often as there is reason to.

Python shows a warning of the same text and line once in a process; a job that fails in the second
run as it did in the first is news again.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from waterflow.common.environment import is_library_file

_NEVER_THE_USERS = ("waterflow", "torch")


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int


def place_of_call() -> Place:
    """The line outside of this package that has called it, as seen from the calling thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) == "waterflow":
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def place_of_function(function: Callable[..., Any]) -> Place | None:
    """The line where a function begins; None for what is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else Place(code.co_filename, code.co_firstlineno)


def place_of_error(error: BaseException) -> Place | None:
    """The last line of the user's own on an error's way; None where no such line was on it.

    Where the way leads through other libraries alone, the last line of theirs.
    """
    places = [
        Place(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _package(frame) not in _NEVER_THE_USERS and not _is_standard(frame)
    ]
    own = [place for place in places if not is_library_file(place.file)]
    return next(iter([*own[::-1], *places[::-1]]), None)


def warn_at(place: Place, text: str, category: type[Warning]) -> None:
    """Warns of something at a place of the user's code.

    Raises:
        The warning, where filters turn it into an error.
    """
    module = Path(place.file).stem or "unknown"
    warnings.warn_explicit(text, category, place.file, place.line, module, registry={})


def warn_quietly_at(place: Place, text: str, category: type[Warning]) -> None:
    """The same on a thread of the engine's, where an error would end more than was warned of."""
    with contextlib.suppress(Warning):
        warn_at(place, text, category)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_standard(frame: FrameType) -> bool:
    return _package(frame) in sys.stdlib_module_names
