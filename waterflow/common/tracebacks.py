"""What an error that somebody keeps must not keep alive: the frames of its traceback know their
variables, and each of them its caller's, down to the bottom of the thread."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def let_go_of_frames(error: BaseException) -> None:
    """Clears the variables of all frames that the error and its causes were raised through."""
    for one in _with_causes(error):
        traceback.clear_frames(one.__traceback__)


def let_go_of_callers(error: BaseException) -> None:
    """Clears the variables of this package's own frames from which those were called, as far as
    these have ended; those of its users are theirs."""
    seen: set[FrameType] = set()
    for one in _with_causes(error):
        for raised, _ in traceback.walk_tb(one.__traceback__):
            frame: FrameType | None = raised
            while frame is not None and frame not in seen:
                seen.add(frame)
                _clear(frame)
                frame = frame.f_back


def _clear(frame: FrameType) -> None:
    is_own = str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE
    if is_own and not frame.f_code.co_flags & inspect.CO_GENERATOR:  # clearing would close it
        with contextlib.suppress(RuntimeError):  # it is running
            frame.clear()


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
