"""Sets of addresses, as spans of them."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

Span = tuple[int, int]


class Spans:
    """A set of whole numbers, made of spans from a start up to before a stop. Never changed."""

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
        return Spans() if self.is_disjoint(other) else Spans(_common(list(self), list(other)))

    def __sub__(self, other: Spans) -> Spans:
        if self.is_disjoint(other):
            return self
        low, high = self._starts[0], self._stops[-1]
        gaps = zip([low, *other._stops], [*other._starts, high], strict=True)
        return self & Spans(gaps)

    def is_disjoint(self, other: Spans) -> bool:
        """Whether no number is in both; quickly, as there may be many spans."""
        if not (self and other):
            return True
        starts, stops = self._arrays
        begins, ends = other._arrays
        following = np.searchsorted(ends, starts, side="right")  # the first that ends behind
        found = following < len(ends)
        return not bool((begins[following[found]] < stops[found]).any())

    def meets(self, start: int, stop: int) -> bool:
        """Whether some number from `start` up to before `stop` is in the set."""
        before = bisect.bisect_left(self._starts, stop) - 1
        return before >= 0 and start < min(stop, self._stops[before])

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return np.array(self._starts, dtype=np.uint64), np.array(self._stops, dtype=np.uint64)


def _common(one: list[Span], other: list[Span]) -> Iterator[Span]:
    at_one = at_other = 0
    while at_one < len(one) and at_other < len(other):
        (start, stop), (begin, end) = one[at_one], other[at_other]
        yield max(start, begin), min(stop, end)
        at_one, at_other = at_one + (stop <= end), at_other + (end <= stop)
