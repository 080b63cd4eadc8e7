"""Full garbage collections, fewer of them where engines run.

Each goes through all objects of the process, those of torch's modules first, while every thread
that needs the interpreter waits: 0.2 s. Hundreds of jobs that come and go make so many objects that
one would follow on another every other second. So between two passes at least twenty times what the
last has taken, also where the engine ends meanwhile. Young objects, and garbage among them, are
collected as ever; and before a job fails for want of room, all are.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from typing import Any

#: From one full collection to the next passes so many times what it takes, and what that is until
#: one was seen.
_PAUSE, _SECONDS = 20, 0.2
#: A threshold that is not reached.
_NEVER = 1 << 30

_lock = threading.RLock()  # a finalizer may come between
_installed = 0
_threshold = 0  # of the oldest generation, as somebody else has set it
_latest = 0.0  # when the latest full collection began, or ended
_is_under_way = False  # also when all is done, but for telling so
_took = _SECONDS
_all = 0.0  # seconds of those that have ended


def paused_seconds() -> float:
    """How long full collections have stopped the process by now, since an engine first ran in it.
    Whoever was about to do something then has not had that time."""
    with _lock:
        return _all + (time.perf_counter() - _latest if _is_under_way else 0.0)


def install() -> None:
    """From now on full collections keep that distance, until as many `uninstall`s, and as long as
    it takes from the one before these."""
    global _installed, _latest
    with _lock:
        _installed += 1
        if _note not in gc.callbacks:
            _latest = time.perf_counter()
            gc.callbacks.append(_note)  # for good: who has asked for the threshold may set it again
            atexit.register(_end)
        _put_off()


def uninstall() -> None:
    """Takes back one `install`."""
    global _installed
    with _lock:
        _installed -= 1


def _note(phase: str, info: dict[str, Any]) -> None:
    """Called before each collection and after it, on whatever thread it is."""
    global _latest, _is_under_way, _took, _all
    now = time.perf_counter()
    if info["generation"] == 2:
        with _lock:
            if phase == "stop":
                _took = now - _latest
                _all += _took
            _latest, _is_under_way = now, phase == "start"
    if phase == "stop" and now - _latest >= _PAUSE * _took:
        _allow()
    elif phase == "stop" and _installed:
        _put_off()


def _put_off() -> None:
    global _threshold
    young, middle, old = gc.get_threshold()
    if old not in (0, _NEVER):
        _threshold = old
        gc.set_threshold(young, middle, _NEVER)


def _allow() -> None:
    young, middle, old = gc.get_threshold()
    if old == _NEVER:
        gc.set_threshold(young, middle, _threshold)


def _end() -> None:
    """The process ends: what `_note` needs will be gone."""
    if _note in gc.callbacks:
        gc.callbacks.remove(_note)


def _forked() -> None:
    """In a process that was just forked there is no engine, and the lock may be held by others."""
    global _lock, _installed, _is_under_way
    _lock, _installed, _is_under_way = threading.RLock(), 0, False
    _allow()


os.register_at_fork(after_in_child=_forked)
