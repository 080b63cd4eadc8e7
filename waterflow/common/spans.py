"""Sets of addresses, as spans of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Span = tuple[int, int]


class Spans:
    """A set of whole numbers, made of spans from a start up to before a stop."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(set(spans)):
            if stop <= start:
                continue
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._starts, self._stops, strict=True)

    def __or__(self, other: Spans) -> Spans:
        return Spans((*self, *other))

    def __and__(self, other: Spans) -> Spans:
        return Spans(_common(list(self), list(other)))

    def meets(self, start: int, stop: int) -> bool:
        """Whether some number from `start` up to before `stop` is in the set."""
        before = bisect.bisect_left(self._starts, stop) - 1
        return before >= 0 and start < min(stop, self._stops[before])


def _common(one: list[Span], other: list[Span]) -> Iterator[Span]:
    at_one = at_other = 0
    while at_one < len(one) and at_other < len(other):
        (start, stop), (begin, end) = one[at_one], other[at_other]
        yield max(start, begin), min(stop, end)
        at_one, at_other = at_one + (stop <= end), at_other + (end <= stop)
