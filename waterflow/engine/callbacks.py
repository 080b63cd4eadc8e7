"""On whose thread callbacks run, who is in one, and which run beside each other.

By default that is a thread of the engine's. Where the user asks for it, it is his own: a callback
is handed over to a thread that waits for a job or for the engine, which does it while it waits; so
SQLite, progress bars and plots see one thread.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from waterflow.capture.own_business import OwnBusiness
from waterflow.capture.python_turns import PYTHON_TURNS
from waterflow.common.errors import JobError
from waterflow.engine.python_lock import PythonLock
from waterflow.executor.run.threads import set_threads_here

Result = TypeVar("Result")

#: Where callbacks may run.
CALLBACKS = ("lane", "caller")


def check_callbacks(callbacks: object) -> None:
    """Raises JobError where `callbacks` is none of `CALLBACKS`."""
    if callbacks not in CALLBACKS:
        known = ", ".join(map(repr, CALLBACKS))
        raise JobError(f"callbacks must be one of {known}, got {callbacks!r}")


class CallbackLeftError(KeyboardInterrupt):
    """Ctrl-C has left a callback that the thread was in; its job stops."""


class _Call:
    """A callback that somebody else is to make."""

    def __init__(self, job: str, function: Callable[[], Any]) -> None:
        self.job = job
        self.function = function
        self.thread = threading.get_ident()  # that waits for it
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _Here(threading.local):
    """The job whose callback the thread is in."""

    job: str | None = None


class Callbacks:
    """The callbacks of one engine's jobs.

    Attributes:
        in_caller: whether those who wait for the engine make them.
        lock: of the engine's state.
        asked: with that lock; of those who wait. Notified when one of them is to make a callback.
        python: the lock that callbacks are made with, but those that run beside each other;
            evaluations are not.
        long: the code of those of which a call has taken a while, whichever job's it was.
    """

    def __init__(
        self,
        in_caller: bool = False,
        threads: tuple[int, int] | None = None,
    ) -> None:
        """Args beyond the obvious.

        in_caller: whether those who wait for the engine make the callbacks.
        threads: intra-op threads of a lane and of other threads; a callback has those of a lane.
        """
        self.lock = threading.RLock()
        self.asked = threading.Condition(self.lock)
        self.in_caller = in_caller
        self.python = PythonLock(self.asked if in_caller else None)
        self.long = WeakSet[CodeType]()
        self._threads = threads
        self._going: list[OwnBusiness] = []  # of callbacks that run beside others
        self._went = threading.Condition()
        self._calls: collections.deque[_Call] = collections.deque()
        self._here = _Here()

    # From the engine's threads

    def run(
        self, job: str, function: Callable[[], Result], own: OwnBusiness | None = None
    ) -> Result:
        """Makes a callback of the job's, where callbacks are made; returns when it is done.

        Args:
            job: its name.
            function: the callback.
            own: what it has to do with, where that is nothing of anybody else's: then others of its
                kind may run beside it.

        Raises:
            Whatever it raises.
        """
        if not self.in_caller:
            return self._make_in_turn(job, function, own)
        call = _Call(job, functools.partial(self._make, job, function))
        with self.asked:
            self._calls.append(call)
            self.asked.notify_all()
        call.done.wait()
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]

    def _make_in_turn(
        self, job: str, function: Callable[[], Result], own: OwnBusiness | None
    ) -> Result:
        if not self.python.is_here:  # an evaluation, which is beside anything
            return self._make(job, function)
        # Whoever has that lock is the only one that begins a callback.
        with self._went:
            if own is None or not all(map(own.is_beside, self._going)):
                own = None
                self._went.wait_for(lambda: not self._going)
            else:
                self._going.append(own)
        if own is None:
            return self._make(job, function)
        depth = self.python.leave()
        try:
            return self._make(job, function)
        finally:
            with self._went:
                self._going.remove(own)
                self._went.notify_all()
            with PYTHON_TURNS.paused():  # as everywhere, the lock comes before the turn
                self.python.come_back(depth)

    def _make(self, job: str, function: Callable[[], Result]) -> Result:
        outer, self._here.job = self._here.job, job
        try:
            return function()
        finally:
            self._here.job = outer

    def is_behind(self, job: str, threads: Collection[int | None]) -> bool:
        """Whether all that these threads do for the job has to wait for a callback that has not
        begun: its own, or another's who has the lock that it wants."""
        calls = list(self._calls)
        if any(call.job == job for call in calls):
            return True
        return self.python.is_kept_from(threads, {call.thread for call in calls})

    # From threads that wait

    @property
    def job_here(self) -> str | None:
        """The job whose callback the calling thread is in; None where it is in none."""
        return self._here.job

    @property
    def is_asked(self) -> bool:
        """Whether a callback waits for the calling thread."""
        return bool(self._calls) and self._here.job is None

    def serve(self) -> None:
        """Makes the callbacks that wait.

        Raises:
            CallbackLeftError: Ctrl-C has left one of them.
        """
        while self.is_asked:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread that waits was faster
                return
            try:
                with _IntraOpThreads(self._threads):
                    call.result = call.function()
            except KeyboardInterrupt:
                call.error = CallbackLeftError()
            except BaseException as error:
                call.error = error
            call.done.set()
            if isinstance(call.error, CallbackLeftError):
                raise CallbackLeftError

    def check_may_wait(self, what: str) -> None:
        """Raises JobError in a callback, where waiting for `what` might never end."""
        if self._here.job is not None:
            raise JobError(
                f"job {self._here.job!r}: its callback waits for {what}, which may itself wait for "
                "this callback to end, as callbacks of an engine run one at a time. Give a "
                "timeout, or wait outside of callbacks"
            )


class _IntraOpThreads:
    """Inside, the calling thread has as many as a lane: numbers may depend on that."""

    def __init__(self, threads: tuple[int, int] | None) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._threads is not None and self._threads[0] != self._before:
            set_threads_here(*self._threads)

    def __exit__(self, *error: object) -> None:
        if self._threads is not None and self._threads[0] != self._before:
            set_threads_here(self._before, self._threads[1])
