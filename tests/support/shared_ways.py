"""Ways in which the losses of two jobs have one count in common: each returns what counts, made
anew for each job."""

from __future__ import annotations

import collections
import functools
import os
import queue
import types
from collections.abc import Callable, Iterator
from typing import Any

Tick = Callable[[], int]


class Count:
    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


def same_attributes() -> Callable[[], Tick]:
    state: dict[str, Any] = {}

    class Borg:
        n: int

        def __init__(self) -> None:
            self.__dict__ = state

        def tick(self) -> int:
            self.n = state.get("n", 0) + 1
            return self.n

    return lambda: Borg().tick


def same_attributes_of_a_class() -> Callable[[], Tick]:
    class Borg:
        state: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.__dict__ = self.state
            self.state.setdefault("n", 0)

        def tick(self) -> int:
            self.n = self.n + 1
            return self.n

    return lambda: Borg().tick


def remembered_object() -> Callable[[], Tick]:
    @functools.cache
    def counter() -> Count:
        return Count()

    return lambda: lambda: counter().tick()


def computed_once() -> Callable[[], Tick]:
    class Holder:
        @functools.cached_property
        def count(self) -> Count:
            return Count()

    holder = Holder()
    return lambda: lambda: holder.count.tick()


def by_default() -> Callable[[], Tick]:
    counts: collections.defaultdict[str, Count] = collections.defaultdict(Count)
    return lambda: lambda: counts["a"].tick()


def of_the_environment() -> Callable[[], Tick]:
    os.environ["WATERFLOW_TEST_COUNT"] = "0"

    def tick() -> int:
        n = int(os.environ["WATERFLOW_TEST_COUNT"]) + 1
        os.environ["WATERFLOW_TEST_COUNT"] = str(n)
        return n

    return lambda: tick


def method_of_a_class() -> Callable[[], Tick]:
    class Counter:
        n = 0

        @classmethod
        def tick(owner) -> int:
            owner.n += 1
            return owner.n

    return lambda: Counter.tick


def only_object() -> Callable[[], Tick]:
    class Single:
        made: Any = None
        n: int

        def __new__(cls) -> Any:
            if cls.made is None:
                cls.made = super().__new__(cls)
                cls.made.n = 0
            return cls.made

        def tick(self) -> int:
            self.n += 1
            return self.n

    return lambda: lambda: Single().tick()


def attribute_made_late() -> Callable[[], Tick]:
    class Late:
        n: int

        def tick(self) -> int:
            self.n = getattr(self, "n", 0) + 1
            return self.n

    late = Late()
    return lambda: late.tick


def turning_queue() -> Callable[[], Tick]:
    numbers: queue.Queue[int] = queue.Queue()
    for number in range(7):
        numbers.put(number)

    def tick() -> int:
        found = numbers.get()
        numbers.put(found)
        return found

    return lambda: tick


def bound_argument() -> Callable[[], Tick]:
    state = [0]

    def tick(held: list[int]) -> int:
        held[0] += 1
        return held[0]

    return lambda: functools.partial(tick, state)


def bound_object() -> Callable[[], Tick]:
    state = types.SimpleNamespace(n=0)

    def tick(self: Any) -> int:
        self.n += 1
        return int(self.n)

    return lambda: types.MethodType(tick, state)


def field_of_a_tuple() -> Callable[[], Tick]:
    class Pair(collections.namedtuple("Pair", "numbers")):
        pass

    pair = Pair([0])

    def tick() -> int:
        pair.numbers[0] += 1
        return int(pair.numbers[0])

    return lambda: tick


WAYS = {
    made.__name__.replace("_", " "): made
    for made in (
        same_attributes,
        same_attributes_of_a_class,
        remembered_object,
        computed_once,
        by_default,
        of_the_environment,
        method_of_a_class,
        only_object,
        attribute_made_late,
        turning_queue,
        bound_argument,
        bound_object,
        field_of_a_tuple,
    )
}


def apart() -> Iterator[tuple[str, Callable[[], Tick]]]:
    """What looks like one of these, and tells no job of another."""

    @functools.cache
    def table(length: int) -> list[float]:
        return [1.0] * length

    notes: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    plain = os.environ

    def noting() -> int:
        notes["a"].append(1)
        return 1

    def reading() -> int:
        return len(plain.get("HOME", "")) + 1

    yield "a table that is read", lambda: lambda: len(table(3))
    yield "notes", lambda: noting
    yield "the environment read", lambda: reading
    yield "own objects", lambda: Count().tick
    yield "own arguments", lambda: functools.partial(Count.tick, Count())
