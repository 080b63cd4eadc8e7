"""A job's own random streams, whatever its Python code draws from.

The loop that a job stands for has the process's generators to itself. Here they are everybody's, so
they are neither lent nor touched. While a job's scope is open on a thread, these act on the job's
streams, on that thread alone: torch's random operators; the functions that seed and save torch's
generators; the functions of the modules `random` and `numpy.random`. Those of the last two that
somebody has imported by name before know nothing of scopes, nor do generators of one's own.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch

from waterflow.allocator_ext import _C
from waterflow.executor.device.base import Device

_shared_numpy: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]
_shared_python: random.Random = random.getstate.__self__  # type: ignore[attr-defined]


#: Held while a job's stream is made.
_making = threading.Lock()


@dataclass(frozen=True)
class RngState:
    """Where all streams of a job stand."""

    host: torch.Tensor
    device: torch.Tensor | None
    python: Any
    numpy: Any


class JobRng:
    """All random streams of one job.

    Attributes:
        host: torch's stream of the host.
        device: torch's stream of the job's device; None where the host's serves.
        touched: whether Python code has looked at torch's streams, or set them.
    """

    # Few jobs draw from these. To make them takes a hundred microseconds, to note where they begin
    # a third of that.
    _python: random.Random | Callable[[], random.Random]
    _numpy: np.random.RandomState | Callable[[], np.random.RandomState]

    def __init__(self, seed: int, device: Device | None = None) -> None:
        """torch's streams begin at the seed; Python's and numpy's where the caller's are now, since
        the loop alone would have gone on from there."""
        self.host = torch.Generator().manual_seed(seed)
        self.device = None if device is None else device.generator(seed)
        self._python = _later_copy_of_python(_python_stream())
        self._numpy = _later_copy_of_numpy(_numpy_stream())
        self.touched = False

    @property
    def python(self) -> random.Random:
        """What the module `random` draws from."""
        if callable(self._python):
            with _making:
                if callable(self._python):
                    self._python = self._python()
        return self._python

    @property
    def numpy(self) -> np.random.RandomState:
        """What the module `numpy.random` draws from."""
        if callable(self._numpy):
            with _making:
                if callable(self._numpy):
                    self._numpy = self._numpy()
        return self._numpy

    @property
    def generators(self) -> tuple[torch.Generator, torch.Generator | None]:
        """torch's streams: the host's, and the device's."""
        return self.host, self.device

    def scope(self) -> AbstractContextManager[None]:
        """Redirects the calling thread to these streams; scopes nest. Python's and numpy's modules
        follow while something holds them `install`-ed."""
        return _Scope(self)

    def copy(self) -> JobRng:
        """Streams that will draw the same numbers, independently."""
        twin = JobRng.__new__(JobRng)
        twin.host = copy_generator(self.host)
        twin.device = None if self.device is None else copy_generator(self.device)
        twin.touched = False
        python, numpy = self._python, self._numpy
        twin._python = python if callable(python) else _later_copy_of_python(python)
        twin._numpy = numpy if callable(numpy) else _later_copy_of_numpy(numpy)
        return twin

    def state(self) -> RngState:
        """Where the streams stand, to come back to."""
        return RngState(
            host=self.host.get_state(),
            device=None if self.device is None else self.device.get_state(),
            python=self.python.getstate(),
            numpy=self.numpy.get_state(legacy=False),
        )

    def restore(self, state: RngState) -> None:
        """Puts the streams where they stood."""
        self.host.set_state(state.host)
        if self.device is not None and state.device is not None:
            self.device.set_state(state.device)
        self.python.setstate(state.python)
        self.numpy.set_state(state.numpy)

    def mark(self) -> Callable[[], None]:
        """Returns what puts the streams where they stand now. Streams that nobody has drawn from
        are not made for that."""
        host, device = self.host.get_state(), None
        if self.device is not None:
            device = self.device.get_state()
        own, arrays = self._python, self._numpy
        python = None if callable(own) else own.getstate()
        numpy = None if callable(arrays) else arrays.get_state(legacy=False)

        def go_back() -> None:
            self.host.set_state(host)
            if self.device is not None and device is not None:
                self.device.set_state(device)
            self._python, self._numpy = own, arrays
            if python is not None:
                self.python.setstate(python)
            if numpy is not None:
                self.numpy.set_state(numpy)

        return go_back

    def generator_for(self, shared: torch.Generator) -> torch.Generator:
        """The job's stream in place of one of the process's default generators."""
        for own in self.generators:
            if own is not None and own.device == shared.device:
                return own
        return copy_generator(shared)  # of a device without jobs: to look at, not to move


def is_the_processs(generator: object) -> bool:
    """Whether this is one of the generators that the process has by itself, or stands for one."""
    own = (_shared_numpy, _shared_python, _SHARED_HOST._shared)
    stand_in = isinstance(generator, (_SharedGenerator, _SharedNumpy))
    return stand_in or any(generator is each for each in own)


def copy_generator(generator: torch.Generator) -> torch.Generator:
    """A generator that will draw the same numbers, independently."""
    twin = torch.Generator(device=generator.device)
    twin.set_state(generator.get_state())
    return twin


def _later_copy_of_python(stream: random.Random) -> Callable[[], random.Random] | random.Random:
    """Makes a stream that stands where this one stands now, when it is wanted; as `copy.deepcopy`,
    which takes a hundred times as long."""
    if type(stream) is not random.Random:
        return copy.deepcopy(stream)
    state = stream.getstate()

    def make() -> random.Random:
        twin = random.Random()
        twin.setstate(state)
        return twin

    return make


def _later_copy_of_numpy(
    stream: np.random.RandomState,
) -> Callable[[], np.random.RandomState] | np.random.RandomState:
    state: Any = stream.get_state(legacy=False)
    if type(stream) is not np.random.RandomState or state["bit_generator"] != "MT19937":
        return copy.deepcopy(stream)

    def make() -> np.random.RandomState:
        twin = np.random.RandomState(np.random.MT19937(0))
        twin.set_state(state)
        return twin

    return make


class _Here(threading.local):
    """The streams of the innermost scope of this thread."""

    rng: JobRng | None = None


_here = _Here()


def outside() -> AbstractContextManager[None]:
    """Gives the calling thread the process's streams back, whatever job's it has."""
    return _Scope(None)


class _Scope(AbstractContextManager[None]):
    __slots__ = ("_former", "_operators", "_rng")

    def __init__(self, rng: JobRng | None) -> None:
        self._rng = rng
        host, device = (_SHARED_HOST._shared, None) if rng is None else (rng.host, rng.device)
        self._operators = _C.RandomScope(host, device)

    def __enter__(self) -> None:
        self._operators.__enter__()
        self._former = _here.rng
        _here.rng = self._rng

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _here.rng = self._former
        self._operators.__exit__()


class _SharedGenerator(torch.Generator):
    """One of the process's default generators; in a scope, the job's own in its place.

    Operators take it for the process's, and the scope replaces that for them.
    """

    _shared: torch.Generator

    def __new__(cls, shared: torch.Generator) -> _SharedGenerator:
        """A stand-in for `shared`."""
        self = super().__new__(cls, shared.device)  # type: ignore[call-arg]
        self._shared = shared
        _C.alias_generator(self, shared)
        return self


def _of_generator(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.Generator, name))
    def method(self: _SharedGenerator, *args: Any) -> Any:
        rng = _here.rng
        if rng is None:
            return getattr(self._shared, name)(*args)
        rng.touched = True
        stream = rng.generator_for(self._shared)
        return getattr(stream, name)(*args)

    return method


for _name, _method in list(vars(torch.Generator).items()):
    if callable(_method) and (not _name.startswith("_") or _name == "__reduce__"):
        setattr(_SharedGenerator, _name, _of_generator(_name))


class _SharedNumpy(np.random.RandomState):
    """numpy's hidden generator, which libraries take from its place; in a scope, the job's own."""

    def __getattribute__(self, name: str) -> Any:
        return getattr(_numpy_stream(), name)


def _numpy_stream() -> np.random.RandomState:
    rng = _here.rng
    return _shared_numpy if rng is None else rng.numpy


def _python_stream() -> random.Random:
    rng = _here.rng
    return _shared_python if rng is None else rng.python


class _Redirected:
    """A module's function that is a method of the module's hidden generator; in a scope, of the
    job's own. Like the built-in method that it replaces, it binds to no class."""

    def __init__(self, original: Any, stream: Callable[[], Any], name: str) -> None:
        functools.update_wrapper(self, original)
        self.__self__ = stream()
        self._original = original
        self._stream = stream
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _here.rng is None:
            return self._original(*args, **kwargs)
        return getattr(self._stream(), self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._name == "__init__":
            return self._original.__reduce__()  # type: ignore[no-any-return]
        return getattr, (self._stream(), self._name)


#: Places in modules that refer to a generator of the process: what is there, and what replaces it.
_Place = tuple[ModuleType, str, Any, Any]
_lock = threading.Lock()  # guards what follows; installing is done whole or not begun
_installed = 0
_replaced: list[_Place] = []


def install() -> None:
    """Makes the modules' functions and generators aware of scopes, until as many `uninstall`s."""
    global _installed
    with _lock:
        _installed += 1
        if _installed > 1:
            return
        _replaced[:] = _places()
        for module, name, original, ours in _replaced:
            if getattr(module, name) is original:
                setattr(module, name, ours)


def install_again() -> bool:
    """One more `install`, if there is one already; returns whether there was."""
    global _installed
    with _lock:
        _installed += _installed > 0
        return _installed > 0


def uninstall() -> None:
    """Takes back one `install`; with the last, the modules are what they were."""
    global _installed
    with _lock:
        _installed -= 1
        if _installed > 0:
            return
        for module, name, original, ours in _replaced:
            if getattr(module, name) is ours:  # else somebody has put something of theirs there
                setattr(module, name, original)


def _places() -> list[_Place]:
    host = _SHARED_HOST
    places: list[_Place] = [
        (module, "default_generator", host._shared, host)
        for module in (torch, torch.random, torch._C)
    ]
    if torch.cuda.is_initialized():
        shared = torch.cuda.default_generators
        places.append((torch.cuda, "default_generators", shared, _of_devices(shared)))
    return places + _MODULE_PLACES


@functools.cache
def _of_devices(shared: tuple[torch.Generator, ...]) -> tuple[torch.Generator, ...]:
    return tuple(_SharedGenerator(generator) for generator in shared)


def _methods(module: ModuleType, shared: object, stream: Callable[[], Any]) -> list[_Place]:
    """The functions of a module that are methods of its hidden generator."""
    return [
        (module, name, value, _Redirected(value, stream, value.__name__))
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is shared
    ]


def _module_places() -> list[_Place]:
    mtrand = np.random.mtrand
    places = _methods(random, _shared_python, _python_stream)
    for module in (np.random, mtrand):
        places += _methods(module, _shared_numpy, _numpy_stream)
        exchange = module.set_bit_generator  # type: ignore[attr-defined]
        redirected = _Redirected(exchange, _numpy_stream, "__init__")
        places.append((module, "set_bit_generator", exchange, redirected))
    return [*places, (mtrand, "_rand", _shared_numpy, _SharedNumpy(0))]


def _fork_without_locked_seeding() -> None:
    """A loader's workers are forked while other threads may be seeding torch, or making a stream,
    which locks; workers seed as they begin, and would find that locked for ever."""
    modules = (torch.cuda, torch.xpu, torch.mtia)
    for lock in (_making, *(getattr(module, "_initialization_lock", None) for module in modules)):
        if lock is not None:
            os.register_at_fork(
                before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
            )


_fork_without_locked_seeding()
_SHARED_HOST = _SharedGenerator(torch.default_generator)
_MODULE_PLACES = _module_places()
