"""Tables of cases of which the ordinary tests take some, and the soak the others.

What cases tell apart is tried each time; that it holds for near duplicates, and wherever two axes
cross, is tried where there are hours.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def soaked(*values: Any) -> ParameterSet:
    """A case for the soak: a value for each argument, or one that `pytest.param` has made."""
    if len(values) == 1 and isinstance(values[0], ParameterSet):
        (case,) = values
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.soak], id=case.id)
    return pytest.param(*values, marks=pytest.mark.soak)


def thinned(cases: Iterable[Any], keep: int | Collection[Any]) -> list[Any]:
    """The cases, all but some of them for the soak.

    Args:
        cases: values for `pytest.mark.parametrize`. Of a tuple each value is another argument's.
        keep: how many of them the ordinary tests take, evenly spread, or which.
    """
    table = list(cases)
    if isinstance(keep, int):
        kept = {(2 * n + 1) * len(table) // (2 * keep) for n in range(keep)}
    else:
        kept = {table.index(case) for case in keep}  # a ValueError: it is none of the cases
    return [
        case if n in kept else soaked(*(case if type(case) is tuple else [case]))
        for n, case in enumerate(table)
    ]


def crossed(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs of two axes' values, of which the ordinary tests take every value at least once.

    They go along both axes at the same time, so that the values of the shorter one alternate.
    """
    steps = range(max(len(first), len(second)))
    keep = {(n % len(first), n % len(second)) for n in steps}
    return [
        (one, other) if (i, j) in keep else soaked(one, other)
        for (i, one), (j, other) in itertools.product(enumerate(first), enumerate(second))
    ]
