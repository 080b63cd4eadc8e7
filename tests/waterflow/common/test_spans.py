"""Sets of addresses, beside sets of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.spans import Spans

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def numbers(spans: list[tuple[int, int]]) -> set[int]:
    return {number for start, stop in spans for number in range(start, stop)}


@given(SPANS, SPANS)
def test_they_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert numbers([*Spans(one)]) == numbers(one)
    assert numbers([*(Spans(one) | Spans(other))]) == numbers(one) | numbers(other)
    assert numbers([*(Spans(one) & Spans(other))]) == numbers(one) & numbers(other)
    assert numbers([*(Spans(one) - Spans(other))]) == numbers(one) - numbers(other)
    assert Spans(one).is_disjoint(Spans(other)) == numbers(one).isdisjoint(numbers(other))
    assert bool(Spans(one)) == bool(numbers(one))


@given(SPANS, st.integers(0, 40), st.integers(1, 40))
def test_they_know_whom_they_meet(spans: list[tuple[int, int]], start: int, length: int) -> None:
    met = not numbers(spans).isdisjoint(range(start, start + length))
    assert Spans(spans).meets(start, start + length) == met
