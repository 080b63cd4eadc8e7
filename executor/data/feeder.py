"""Feeds a job with batches beside compute, in the job's own random stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from waterflow.allocator_ext import _C

Item = TypeVar("Item")


@dataclass
class FeedItem(Generic[Item]):
    """What a feeder hands out: an item, the end of the data, or an error."""

    item: Item | None = None
    epoch: int = 0
    error: BaseException | None = None
    end: bool = False


class Feeder(Generic[Item]):
    """A thread that iterates a job's data once per epoch and prepares each batch.

    The loop it stands for draws from one random stream in turn: the data loader for a batch, then
    the model for the step. A job whose step draws nothing can therefore fetch ahead; one whose step
    does fetches the next batch only after the step (`may_run_ahead` decides, per batch).

    `_changed` guards the queue, `_done` and `_stopped`; `_fetched` is the thread's own. Only one
    thread takes, so what it has peeked at stays the first until it takes it: `peek` needs no lock.
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
        ahead: int = 2,
    ) -> None:
        """Args beyond the obvious.

        prepare: makes the item of a batch, on the feeder's thread; before it touches the job's
            tensors it calls its second argument, which waits for the steps under way.
        python: runs the data's Python, with the job's random streams, in its caller's context.
        enter_epoch: called before the data of an epoch are begun, where all steps before it are
            done by then; else whoever takes its first batch sees to what comes between epochs.
        adopt_thread: called once on the feeder's thread, before anything else.
        on_ready: called, on the feeder's thread, when something can be taken.
        ahead: batches to hold at most.
        """
        self._data = data
        self._prepare = prepare
        self._python = python
        self._epochs = epochs
        self._steps = steps
        self._may_run_ahead = may_run_ahead
        self._enter_epoch = enter_epoch
        self._adopt_thread = adopt_thread
        self._on_ready = on_ready
        self._ahead = ahead
        self._queue: deque[FeedItem[Item]] = deque()
        self._changed = threading.Condition()
        self._done = 0
        self._fetched = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"waterflow-data-{name}")
        self._thread.daemon = True

    @property
    def started(self) -> bool:
        """Whether it has been started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Starts fetching."""
        self._thread.start()

    def peek(self) -> FeedItem[Item] | None:
        """The next thing to take, None while there is none."""
        return self._queue[0] if self._queue else None

    def take(self) -> FeedItem[Item]:
        """Takes the next thing; there must be one."""
        with self._changed:
            fed = self._queue.popleft()
            self._changed.notify_all()
        return fed

    def step_done(self) -> None:
        """The step on the batch last taken has ended, with all that it draws."""
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Asks the thread to end; a data loader that hangs is left to itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Waits for the thread."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._adopt_thread()
            for epoch, batch in self._batches():
                self._put(FeedItem(self._prepare(batch, self._wait_for_former_steps), epoch))
            fed: FeedItem[Item] = FeedItem(end=True)
        except BaseException as error:
            fed = FeedItem(error=error)
        self._put(fed)

    def _put(self, fed: FeedItem[Item]) -> None:
        _C.release_intra_op_threads()  # what it was captured with would hinder the lanes'
        with self._changed:
            self._queue.append(fed)
        self._on_ready()

    def _wait_for_former_steps(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fetched - 1 == self._done)

    def _wait_for_turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(self._may_fetch)
            return not self._stopped

    def _may_fetch(self) -> bool:
        if self._stopped or self._fetched == self._done:
            return True
        return self._may_run_ahead() and len(self._queue) < self._ahead

    def _batches(self) -> Iterator[tuple[int, Any]]:
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            if not self._wait_for_turn():
                return
            if self._fetched == self._done:
                self._enter_epoch(epoch)
            iterator = self._start_epoch()
            fetched_before = self._fetched
            while self._steps is None or self._fetched < self._steps:
                if not self._wait_for_turn():
                    return
                try:
                    batch = self._next(iterator)
                except StopIteration:
                    break
                self._fetched += 1
                yield epoch, batch
            else:
                return
            if self._fetched == fetched_before:
                raise ValueError(self._nothing(epoch))
            epoch += 1

    def _nothing(self, epoch: int) -> str:
        hint = " (a generator can be iterated once only: pass a list or a DataLoader)"
        return f"its data yielded no batch in epoch {epoch}{hint if epoch else ''}"

    def _start_epoch(self) -> Iterator[Any]:
        # Worker processes are forked here: in each, this thread goes on with the job's streams.
        return self._python(lambda: iter(self._data))  # type: ignore[no-any-return]

    def _next(self, iterator: Iterator[Any]) -> Any:
        return self._python(lambda: next(iterator))
