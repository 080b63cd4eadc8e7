"""The events of an engine, for ``async for``."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator

from waterflow.engine.events import EngineEnded, Event, EventStream


class EventIterator(AsyncIterator[Event]):
    """Every event from the moment when it is made, until the engine has ended.

    Whoever comes after the end hears of that only. Who lets go of it hears no more.
    """

    def __init__(self, stream: EventStream) -> None:
        self._heard: deque[Event] = deque()
        self._bell: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_over = False
        me = weakref.ref(self)

        def hear(event: Event) -> None:
            if (iterator := me()) is not None:
                iterator._hear(event)

        self._leave = weakref.finalize(self, stream.unsubscribe, hear)
        stream.subscribe(hear)
        if stream.has_ended:
            self._hear(EngineEnded())  # perhaps for the second time: nobody asks for that one

    def _hear(self, event: Event) -> None:
        self._heard.append(event)
        if self._bell is not None:
            loop, bell = self._bell
            with contextlib.suppress(RuntimeError):  # nobody listens, the loop is closed
                loop.call_soon_threadsafe(bell.set)

    async def __anext__(self) -> Event:
        while not self._heard and not self._is_over:
            bell = self._bell_here()
            bell.clear()
            if not self._heard:  # nothing has come before the bell could be heard
                await bell.wait()
        if self._is_over:
            raise StopAsyncIteration
        event = self._heard.popleft()
        if isinstance(event, EngineEnded):
            self._end()
        return event

    def _bell_here(self) -> asyncio.Event:
        loop = asyncio.get_running_loop()
        if self._bell is None or self._bell[0] is not loop:
            self._bell = loop, asyncio.Event()
        return self._bell[1]

    def _end(self) -> None:
        self._leave()
        self._is_over = True
        if self._bell is not None:  # others may wait for an event
            self._bell[1].set()

    async def aclose(self) -> None:
        """Hears no more: for `contextlib.aclosing`, and whoever leaves the loop early."""
        self._end()
