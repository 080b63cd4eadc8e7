"""`shared`: one loader for many jobs, each batch made once and given to all of them.

Epochs have numbers, and the batches of an epoch depend on nothing else, so no job waits for another
one: whoever comes first makes a batch, who comes later is given a copy of it while it is kept, and
who comes later still has the epoch made once more, from where its random streams began.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from waterflow.capture.caller import CallerContext
from waterflow.capture.tracing import TRACE_LOCK
from waterflow.common.errors import JobError
from waterflow.executor.data.batches import batches_of
from waterflow.executor.run import rng
from waterflow.executor.run.rng import JobRng
from waterflow.job.batch_copy import copied
from waterflow.job.epochs import NumberedEpochs
from waterflow.job.training_step import draw_seed

_NOTHING = object()


def shared(data: Iterable[Any], *, seed: int | None = None, window: int = 64) -> SharedData:
    """Lets several jobs read one loader: ``data = wf.shared(loader)``, then ``data=data`` in each.

    Every job reads the batches of this loop, at its own pace::

        torch.manual_seed(seed)
        for epoch in range(epochs):
            for batch in loader:
                ...

    Shuffles and random transforms draw from streams that belong to the data: torch's begins at
    `seed`, those of `random` and `numpy.random` where they are now, and a loader's own generator
    where that is now. So they leave the jobs' streams alone, and ``wf.run_eager`` reads the same
    batches. Each job has copies: one that writes to its batch changes nobody else's.

    Args:
        data: a DataLoader, or anything that can be iterated once per epoch.
        seed: of torch's stream; None: drawn from torch's default generator, now.
        window: so many batches at most are kept for jobs that are behind; one that is further
            behind has the epoch made again up to where it is.

    Raises:
        JobError: an argument cannot be used.
    """
    if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")) or isinstance(
        data, Iterator
    ):
        raise JobError(
            "wf.shared needs data that can be iterated once per epoch, like a DataLoader or a "
            f"list, got {type(data).__name__}"
        )
    if isinstance(data, NumberedEpochs):
        raise JobError("wf.shared was given data that is shared already; give the jobs that one")
    if getattr(data, "persistent_workers", False):
        raise JobError(
            "wf.shared cannot share a loader with persistent_workers=True: its workers serve one "
            "iteration at a time, jobs may be in several; make the loader without"
        )
    if type(window) is not int or window < 1:
        raise JobError(f"window must be a positive whole number of batches, got {window!r}")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
        raise JobError(f"seed must be a whole number or None, got {seed!r}")
    return SharedData(data, draw_seed() if seed is None else seed, window)


@dataclass(frozen=True)
class _Streams:
    """What the data's Python draws from, where it stands."""

    rng: JobRng
    generators: list[torch.Tensor]

    def copy(self) -> _Streams:
        return _Streams(self.rng.copy(), list(self.generators))


@dataclass(eq=False)
class _Pass:
    """One iteration of an epoch, as far as it has come.

    Attributes:
        kept: the last batches by their positions; nobody writes to them.
        made: batches so far.
        over: whether there are no more.
        error: why, where it is not that the epoch is over; and where it was raised.
    """

    epoch: int
    streams: _Streams
    iterator: Iterator[Any] | None = None
    kept: dict[int, Any] = field(default_factory=dict)
    made: int = 0
    over: bool = False
    error: Exception | None = None
    error_at: TracebackType | None = None
    readers: weakref.WeakSet[_Reader] = field(default_factory=weakref.WeakSet)

    def serves(self, epoch: int, position: int) -> bool:
        """Whether it has that batch or will come to it."""
        return epoch == self.epoch and (position in self.kept or position >= self.made)

    def let_know(self) -> None:
        """Raises what the data's Python has raised, to each reader as if to it alone."""
        if self.error is not None:
            raise self.error.with_traceback(self.error_at)


class _Reader(Iterator[Any]):
    """A job's way through an epoch."""

    def __init__(self, data: SharedData, epoch: int) -> None:
        self._data = data
        self.epoch = epoch
        self.position = 0
        self.current: _Pass | None = None

    def __next__(self) -> Any:
        found = _NOTHING
        if self.current is not None:  # no lock: who makes a batch may take long
            found = self.current.kept.get(self.position, _NOTHING)
        if found is _NOTHING:
            found = self._data._made(self)
        self.position += 1
        try:
            return copied(found)
        except Exception as error:
            raise JobError(
                "a batch of shared data holds something that cannot be copied for each job; make "
                f"it of tensors and plain values, or give each job a loader of its own: {error}"
            ) from error


class SharedData(NumberedEpochs):
    """Data that several jobs read; made by `shared`.

    Iterated by hand, each iteration is the next epoch; jobs always begin with epoch 0.

    `_lock` guards everything, and is held while the data's Python runs: no two threads are in it.
    """

    def __init__(self, data: Iterable[Any], seed: int, window: int) -> None:
        self._data = data
        self._window = window
        self._caller = CallerContext()
        self._generators = _generators_of(data)
        states = [generator.get_state() for generator in self._generators]
        self._starts = [_Streams(JobRng(seed), states)]  # of epochs, as far as they are known
        self._passes: list[_Pass] = []
        self._by_hand = 0
        self._lock = threading.Lock()

    @property
    def source(self) -> Iterable[Any]:
        """What the batches are made from."""
        return self._data

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch 0, 1, ...

        Raises:
            Whatever the data raises, then and for every job that comes to that batch.
        """
        return _Reader(self, number)

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            number = self._by_hand
            self._by_hand += 1
        yield from self.epoch(number)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def _made(self, reader: _Reader) -> Any:
        """The reader's next batch, by the pass that has it or comes to it."""
        with self._lock:
            one = self._pass_for(reader)
            while one.made <= reader.position and not one.over:
                self._advance(one)
            if reader.position in one.kept:
                return one.kept[reader.position]
            one.let_know()
            raise StopIteration

    def _pass_for(self, reader: _Reader) -> _Pass:
        one = reader.current
        if one is not None and one in self._passes and one.serves(reader.epoch, reader.position):
            return one
        serving = [p for p in self._passes if p.serves(reader.epoch, reader.position)]
        serving.sort(key=lambda p: reader.position not in p.kept)
        found = serving[0] if serving else self._begin(reader.epoch)
        if one is not None:
            one.readers.discard(reader)
        found.readers.add(reader)
        reader.current = found
        return found

    def _begin(self, epoch: int) -> _Pass:
        """A new pass; of those that nobody reads the last ones stay, while they are small."""
        while len(self._starts) <= epoch:
            self._run_through(len(self._starts) - 1)
        idle = [one for one in self._passes if not one.readers]
        while sum(len(one.kept) for one in idle) > self._window:
            self._passes.remove(idle.pop(0))
        self._passes.append(_Pass(epoch, self._starts[epoch].copy()))
        return self._passes[-1]

    def _run_through(self, epoch: int) -> None:
        """Makes an epoch that nobody reads, to know where the next one begins."""
        one = _Pass(epoch, self._starts[epoch].copy())
        while not one.over:
            self._advance(one)
        one.let_know()

    def _advance(self, one: _Pass) -> None:
        """Makes the pass's next batch, or learns its end."""
        batch = _NOTHING
        try:
            batch = self._in_streams(one)
        except Exception as error:
            one.error, one.error_at = error, error.__traceback__
        except BaseException:  # Ctrl-C in the data's Python: nobody can go on from there
            self._passes = [other for other in self._passes if other is not one]
            raise
        if batch is not _NOTHING:
            one.kept[one.made] = batch
            one.kept.pop(one.made - self._window, None)
            one.made += 1
            return
        one.over, one.iterator = True, None
        if one.error is None and len(self._starts) == one.epoch + 1:
            self._starts.append(one.streams.copy())

    def _in_streams(self, one: _Pass) -> Any:
        def fetch() -> Any:
            if one.iterator is None:
                one.iterator = batches_of(self._data)
            return next(one.iterator, _NOTHING)

        with _redirected(), self._generators_of(one):
            return self._caller.run(one.streams.rng, fetch)

    @contextlib.contextmanager
    def _generators_of(self, one: _Pass) -> Iterator[None]:
        """Inside, the loader's own generators stand where the pass has left them."""
        before = [generator.get_state() for generator in self._generators]
        states = one.streams.generators
        _set(self._generators, states)
        try:
            yield
        finally:
            states[:] = [generator.get_state() for generator in self._generators]
            _set(self._generators, before)


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def _redirected() -> Iterator[None]:
    """Inside, the modules `random` and `numpy.random` follow scopes of streams."""
    if not rng.install_again():  # there is no engine
        with TRACE_LOCK:  # a trace patches the same functions for a while
            rng.install()
    try:
        yield
    finally:
        rng.uninstall()


def _generators_of(data: Any) -> list[torch.Generator]:
    """Generators that a loader and its samplers have been given."""
    sampler, batch_sampler = getattr(data, "sampler", None), getattr(data, "batch_sampler", None)
    holders = (data, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    generators = [each for each in found if isinstance(each, torch.Generator)]
    return list({id(each): each for each in generators}.values())
