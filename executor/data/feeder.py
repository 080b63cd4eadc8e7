"""Feeds a job with batches beside compute, in the job's own random stream."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from waterflow.allocator_ext import _C
from waterflow.executor.data.batches import (
    PLAIN_ITERATORS,
    batches_of,
    in_one_go,
    next_batch,
    undrawn,
)

Item = TypeVar("Item")

#: In place of a batch, where an epoch is found to have ended.
_END_OF_EPOCH: Any = object()

#: Fetched in one go, so many are handed out together.
_AT_ONCE = 8

#: A fetch may have waited for the interpreter's lock: the shortest of so many did not.
_TIMED_FETCHES = 4

#: So long a fetch is not to be in the way of a lane.
_LONG_FETCH_SECONDS = 0.0005


@dataclass
class FeedItem(Generic[Item]):
    """What a feeder hands out: an item, the end of the data, an error, or a boundary: all steps are
    done, and nothing is fetched before somebody lets the feeder `go_on`. `epoch_ended` says that it
    is one at the end of an epoch, as found."""

    item: Item | None = None
    epoch: int = 0
    error: BaseException | None = None
    end: bool = False
    boundary: bool = False
    epoch_ended: bool = False


@dataclass(frozen=True)
class Start:
    """Where in its data a feeder begins: `batches` of `epoch` are done, `steps` in all. Whoever
    begins that epoch for it hands out an iterator that has these batches behind it."""

    steps: int = 0
    epoch: int = 0
    batches: int = 0


class _Lent:
    """Work that another thread waits for.

    Attributes:
        may_be_left: whether whoever waits for it may give that up.
        fetches: whether it is in the data's Python, which may take its time.
        is_left: whether nobody waits for it any more: once that returns, it is to end.
    """

    def __init__(self, work: Callable[[], None], may_be_left: bool) -> None:
        self._work = work
        self.may_be_left = may_be_left
        self.done = self.fetches = self.is_left = False
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.done = True


class Feeder(Generic[Item]):
    """A thread that iterates a job's data once per epoch and prepares each batch.

    The loop it stands for draws from one random stream in turn: the data loader for a batch, then
    the model for the step. A job whose step draws nothing can therefore fetch ahead; one whose step
    does fetches the next batch only after the step (`may_run_ahead` decides, per batch).

    Whoever takes a batch may lend the thread work to do on it (`lend`): a job whose steps are the
    user's own Python makes them here, where its data are fetched, as the loop does. Such work may
    go on with `following` batches, which then pass through no queue.

    `_changed` and `_served` have one lock, which guards `ready`, `_done`, `_lent`, `_over` and
    `_stopped`; the rest is the thread's own. Only one thread takes, so what it has peeked at stays
    the first until it takes it: `peek` needs no lock.

    Attributes:
        ready: what can be taken, in its order; others only look at it.
        thread: the thread. Whoever keeps it keeps neither the feeder nor the data.
    """

    def __init__(
        self,
        data: Iterable[Any],
        prepare: Callable[[Any, Callable[[], None]], Item],
        python: Callable[[Callable[[], Any]], Any],
        *,
        epochs: int | None,
        steps: int | None,
        may_run_ahead: Callable[[], bool],
        enter_epoch: Callable[[int], None],
        adopt_thread: Callable[[], None],
        on_ready: Callable[[], None],
        name: str,
        prepares_at_once: Callable[[], Callable[[Any], Item | None]] | None = None,
        ahead: Callable[[], int] = lambda: 2,
        begin: Callable[[Any, int], Iterator[Any]] = lambda data, _: batches_of(data),
        start: Start = Start(),
        before_due: Callable[[int, int], int] = lambda steps, most: most,
        rests_at_ends: bool = False,
        roam: Callable[[], None] = lambda: None,
    ) -> None:
        """Args beyond the obvious.

        prepare: makes the item of a batch, on the feeder's thread; before it touches the job's
            tensors it calls its second argument, which waits for the steps under way.
        python: runs the data's Python, with the job's random streams, in its caller's context.
        enter_epoch: called before the data of an epoch are begun, where all steps before it are
            done by then; else whoever takes its first batch sees to what comes between epochs.
        adopt_thread: called once on the feeder's thread, before anything else.
        on_ready: called, on the feeder's thread, when something can be taken.
        prepares_at_once: makes, for several batches, what makes the item of a batch that needs
            nothing more for it, like those before it; None for any other. Not given where there
            are none such.
        ahead: says how many batches to hold at most. Once it has so many, the thread sleeps until
            half of them are gone: woken for each, it would be in everybody's way.
        begin: begins an epoch, from the data and its number.
        start: where in the data to begin.
        before_due: after so many steps, how many more there may be (`most` at most, its second
            argument) before somebody wants a boundary; asked often, with the lock.
        rests_at_ends: whether there is a boundary at each end of an epoch, where it is found.
        roam: called on the feeder's thread before work of its own that may take its time or start
            others, as lent work may have left it on the cores of a lane.
        """
        self._data = data
        self._start = start
        self._before_due = before_due
        self._rests_at_ends = rests_at_ends
        self._roam = roam
        self._at_boundary = False
        self._shown_after = start.steps - 1  # the last boundary
        self._epoch, self._epoch_began = start.epoch, start.steps - start.batches
        self._prepare = prepare
        self._prepares_at_once = prepares_at_once
        self._python = python
        self._epochs = epochs
        self._steps = steps
        self._may_run_ahead = may_run_ahead
        self._enter_epoch = enter_epoch
        self._adopt_thread = adopt_thread
        self._on_ready = on_ready
        self._ahead = ahead
        self._begin = begin
        self.ready: deque[FeedItem[Item]] = deque()
        lock = threading.RLock()
        self._lock = lock
        self._changed = threading.Condition(lock)
        # Of those whose work the thread does: what happens at each step is none of their business.
        self._served = threading.Condition(lock)
        self._rests_until = 0  # so few are left
        self._awaits_steps = False  # and not room: it sleeps on where a batch is taken
        self._done = self._fetched = start.steps
        self._stopped = False
        self._over = False  # the thread fetches no more
        self._lent: _Lent | None = None
        self._iterator: Iterator[Any] = iter(())  # the epoch's
        self._batches = self._all_batches()
        self._begun: tuple[int, Any] | None = None  # fetched in lent work that cannot go on with it
        self._error: BaseException | None = None  # of a fetch in lent work
        self._fetch_times: deque[float] = deque([0.0], maxlen=_TIMED_FETCHES)
        self.thread = threading.Thread(target=self._run, name=f"waterflow-data-{name}")
        self.thread.daemon = True
        self._owner: object = None

    @property
    def started(self) -> bool:
        """Whether it has been started."""
        return self.thread.ident is not None

    def start(self, owner: object = None) -> None:
        """Starts fetching. `owner` is kept as long as the thread is at work."""
        self._owner = owner
        self.thread.start()

    def peek(self) -> FeedItem[Item] | None:
        """The next thing to take, None while there is none."""
        return self.ready[0] if self.ready else None

    def take(self) -> FeedItem[Item]:
        """Takes the next thing; there must be one."""
        with self._lock:
            fed = self.ready.popleft()
            self._wake_for_room()
        return fed

    def take_while(self, fits: Callable[[FeedItem[Item]], bool], most: int) -> list[FeedItem[Item]]:
        """Takes the next things as far as they are there and fit, `most` at most."""
        taken: list[FeedItem[Item]] = []
        with self._lock:
            while self.ready and len(taken) < most and fits(self.ready[0]):
                taken.append(self.ready.popleft())
            self._wake_for_room()
        return taken

    def put_back(self, taken: Sequence[FeedItem[Item]]) -> None:
        """Gives back the last things taken, whose steps have not begun."""
        with self._lock:
            self.ready.extendleft(reversed(taken))

    def step_done(self, steps: int = 1) -> None:
        """The steps on the batches last taken have ended, with all that they draw."""
        with self._lock:
            self._done += steps
            # A thread that waits for steps fetches nothing before those on all that it has fetched.
            if not self._awaits_steps or self._fetched - self._done <= 1:
                self._wake_at_rest()

    def _wake_for_room(self) -> None:
        if not self._awaits_steps:
            self._wake_at_rest()

    def _wake_at_rest(self) -> None:
        is_own = threading.get_ident() == self.thread.ident  # which need not wake itself
        if len(self.ready) <= self._rests_until and not is_own:
            self._changed.notify_all()

    @property
    def fetch_seconds(self) -> float:
        """What the data's Python takes for a batch, as far as it was seen lately."""
        return min(self._fetch_times)

    @property
    def place(self) -> Start:
        """At a boundary, where in the data that is."""
        return Start(self._fetched, self._epoch, self._fetched - self._epoch_began)

    def go_on(self) -> None:
        """After a boundary: lets the thread fetch the next batch."""
        with self._changed:
            self._at_boundary = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Asks the thread to end; a data loader that hangs is left to itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def lend(self, work: Callable[[], None], patience: float | None = None) -> None:
        """Has the thread do `work` between two fetches; returns when it is done. Where the thread
        does not run, the calling one does it.

        Args:
            work: what to do.
            patience: seconds after which this returns, too, where the work waits for the data of
                `following` batches: it ends once these are there.

        Raises:
            Whatever the work raises.
        """
        lent = _Lent(work, may_be_left=patience is not None)
        with self._changed:
            self._lent = lent
            self._changed.notify_all()
            while not (lent.done or self._over or lent.is_left) and self.started:
                self._served.wait(patience)
                lent.is_left = patience is not None and lent.fetches
        if not (lent.done or lent.is_left):
            lent.do()
        self._lent = None
        error, lent.error = lent.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it knows this frame

    def following(self, prepare: Callable[[Any], Item | None]) -> FeedItem[Item] | None:
        """In lent work, after the step on the batch before: the next batch, where there is one that
        the work can go on with.

        Args:
            prepare: makes the item of a batch; None where the work cannot go on with it.
        """
        if self._stopped or self.ready or self._begun is not None or self._wants_boundary:
            return None
        lent = self._lent
        try:
            fetched = self._fetch_leavable()
            if fetched is None:
                return None
            wanted = fetched[1] is not _END_OF_EPOCH and not (lent is not None and lent.is_left)
            item = prepare(fetched[1]) if wanted else None
        except BaseException as error:
            self._error = error
            return None
        if item is None:
            self._begun = fetched
            return None
        return FeedItem(item, fetched[0])

    def note_shown(self) -> None:
        """The step on the batch that was taken last is known, with all that it writes to: nothing
        but it will be done to the data before the next boundary."""
        if self._done <= self._shown_after:
            with self._changed:
                self._shown_after = self._done - 1
                self._changed.notify_all()

    def undrawn(self, most: int) -> int:
        """On the thread: how many batches may be fetched ahead of the steps before them, `most` at
        most, as nothing is drawn for them."""
        if self._stopped or self._begun is not None or self._error is not None:
            return 0
        if self._done <= self._shown_after:
            return 0
        most = min(most, undrawn(self._iterator))
        if self._steps is not None:
            most = min(most, self._steps - self._fetched)
        return self._before_due(self._fetched, most) if most > 0 else 0

    def fetch_undrawn(self, count: int) -> None:
        """On the thread: fetches so many that are `undrawn`, to be taken as any others; fewer where
        one needs more than to be fetched. Only where there are such as need nothing more."""
        self._python(lambda: self._fetch_all(count))

    def _fetch_all(self, count: int) -> None:
        assert self._prepares_at_once is not None
        made: list[FeedItem[Item]] = []
        epoch = self._epoch
        try:
            prepare = self._prepares_at_once()
            fetch = in_one_go(self._iterator)
            for _ in range(count):
                batch = fetch()
                self._fetched += 1
                item = prepare(batch)
                if item is None:
                    self._begun = epoch, batch
                    break
                made.append(FeedItem(item, epoch))
                if len(made) == _AT_ONCE or not self.ready:  # somebody may wait for it
                    self._append(made)
                    made = []
        except BaseException as error:
            self._error = error
        self._append(made)

    def _fetch_more(self) -> None:
        """What may be fetched ahead and draws nothing is fetched in one go: each time that a thread
        enters the job's context costs more than many a batch."""
        room = self._ahead() - len(self.ready)
        if self._prepares_at_once is None or room < 2 or not self._may_run_ahead():
            return
        count = self.undrawn(room)
        if count:
            self.fetch_undrawn(count)

    def _fetch_leavable(self) -> tuple[int, Any] | None:
        """The next batch, for which the data's Python may take so long that the lane goes away."""
        lent = self._lent
        assert lent is not None
        if not lent.may_be_left:
            return self._next_batch()
        lent.fetches = True
        try:
            return self._next_batch()
        finally:
            with self._changed:  # from here on it is left no more
                lent.fetches = False

    def _next_batch(self) -> tuple[int, Any] | None:
        started = time.perf_counter()
        fetched = next(self._batches, None)
        self._fetch_times.append(time.perf_counter() - started)
        return fetched

    def _run(self) -> None:
        owner, self._owner = self._owner, None
        try:
            self._adopt_thread()
            while (fetched := self._fetch()) is not None:
                epoch, batch = fetched
                if batch is _END_OF_EPOCH:
                    self._wait_until(lambda: self._stopped or self._fetched == self._done)
                    self._rest(epoch_ended=True)
                    continue
                self._put(FeedItem(self._prepare(batch, self._wait_for_former_steps), epoch))
                self._fetch_more()
            fed: FeedItem[Item] = FeedItem(end=True)
        except BaseException as error:
            fed = FeedItem(error=error)
        with self._changed:
            self._over = True
            self._served.notify_all()
        self._put(fed)
        self._batches.close()  # it knows the feeder
        self._iterator = iter(())  # it may have processes
        del owner

    def _fetch(self) -> tuple[int, Any] | None:
        """The next batch with its epoch, in its time; None where there is none."""
        with self._changed:
            ahead = self._ahead()
            self._rests_until = ahead // 2 if len(self.ready) >= ahead else ahead - 1
        self._wait_until(self._may_fetch)
        if self._fetched == self._done and self._wants_boundary and not self._stopped:
            self._rest()
        if self._error is not None:
            raise self._error
        if self._stopped:
            return None
        begun, self._begun = self._begun, None
        if self.fetch_seconds > _LONG_FETCH_SECONDS:
            self._roam()
        return begun or self._next_batch()

    @property
    def _wants_boundary(self) -> bool:
        has_begun = self._fetched > self._start.steps or self._fetched == 0
        return has_begun and self._before_due(self._fetched, 1) == 0

    def _rest(self, epoch_ended: bool = False) -> None:
        """Hands out a boundary, and waits until whoever takes it is done with it. What he does may
        change what steps do to the data, which the first one after it shows."""
        self._at_boundary = True
        self._shown_after = self._fetched
        self._put(FeedItem(epoch=self._epoch, boundary=True, epoch_ended=epoch_ended))
        self._wait_until(lambda: self._stopped or not self._at_boundary)

    def _put(self, fed: FeedItem[Item]) -> None:
        _C.release_intra_op_threads()  # what it was captured with would hinder the lanes'
        self._append([fed])

    def _append(self, made: Sequence[FeedItem[Item]]) -> None:
        with self._lock:
            is_first = bool(made) and not self.ready
            self.ready.extend(made)
            # Whoever lends work has the job, and tells when he gives it back.
            is_news = is_first and not self._has_work
        if is_news:  # whoever takes it sees to those that come after
            self._on_ready()

    def _wait_for_former_steps(self) -> None:
        self._roam()
        self._wait_until(lambda: self._stopped or self._fetched - 1 == self._done)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits on the thread, and does what is lent to it meanwhile."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or ready())
                lent = self._lent
                if lent is None or lent.done:
                    return
            lent.do()
            with self._changed:
                self._served.notify_all()
            del lent  # nor what it has worked on: the next wait may be long

    @property
    def _has_work(self) -> bool:
        return self._lent is not None and not self._lent.done

    def _may_fetch(self) -> bool:
        self._awaits_steps = False
        if self._stopped or self._fetched == self._done:
            return True
        if self._begun is not None or self._error is not None:
            return self._error is not None or self._fetched - 1 == self._done
        if len(self.ready) > self._rests_until or self._wants_boundary:
            return False
        may_run_ahead = self._done > self._shown_after and self._may_run_ahead()
        self._awaits_steps = not may_run_ahead
        return may_run_ahead

    def _all_batches(self) -> Generator[tuple[int, Any], None, None]:
        """The batches with their epochs; whoever asks for one knows that it may be fetched."""
        epoch, skipped = self._start.epoch, self._start.batches
        while self._epochs is None or epoch < self._epochs:
            if self._fetched == self._done:
                self._enter_epoch(epoch)
            self._epoch, self._epoch_began, skipped = epoch, self._fetched - skipped, 0
            self._iterator = self._start_epoch(epoch)
            while self._steps is None or self._fetched < self._steps:
                try:
                    batch = self._next(self._iterator)
                except StopIteration:
                    break
                self._fetched += 1
                yield epoch, batch
            else:
                return
            if self._fetched == self._epoch_began:
                raise ValueError(self._nothing(epoch))
            if self._rests_at_ends:
                yield epoch, _END_OF_EPOCH
            epoch += 1

    def _nothing(self, epoch: int) -> str:
        hint = " (a generator can be iterated once only: pass a list or a DataLoader)"
        return f"its data yielded no batch in epoch {epoch}{hint if epoch else ''}"

    def _start_epoch(self, epoch: int) -> Iterator[Any]:
        self._roam()
        # Worker processes are forked here: in each, this thread goes on with the job's streams.
        return self._python(functools.partial(self._begin, self._data, epoch))  # type: ignore[no-any-return]

    def _next(self, iterator: Iterator[Any]) -> Any:
        if type(iterator) in PLAIN_ITERATORS:
            return next(iterator)
        return self._python(functools.partial(next_batch, iterator))
