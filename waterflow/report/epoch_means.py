"""Means over an epoch of what its steps have told, weighted and added up as a loop does it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from waterflow.common.errors import ReportError

Precision = Literal["float64", "float32"]


def epoch_means(
    columns: Mapping[str, Sequence[float]],
    ends: Sequence[int],
    weight: str | None,
    precision: Precision,
) -> list[dict[str, float]]:
    """The mean of each column over each stretch of steps.

    Args:
        columns: a number per step of each, by name.
        ends: how many steps have been made at the end of each stretch; never decreases.
        weight: the name of the column that tells each step's weight; None: all weigh the same.
        precision: in which values, products and sums are rounded, in the order of the steps.

    Raises:
        ReportError: there is no such column or precision.
    """
    if precision not in ("float64", "float32"):
        raise ReportError(f"precision must be 'float64' or 'float32', got {precision!r}")
    if weight is not None and weight not in columns:
        known = ", ".join(map(repr, columns))
        raise ReportError(
            f"weight={weight!r} is no metric of this job, which has told {known}: return it beside "
            f"the loss, as in (loss, {{{weight!r}: len(batch), ...}})"
        )
    kind = np.dtype(precision).type
    total = max(ends, default=0)
    weights = [1.0] * total if weight is None else columns[weight]
    with np.errstate(all="ignore"):  # what has diverged is NaN or infinite, without a word
        return [
            {
                name: _mean(values[start:stop], weights[start:stop], kind)
                for name, values in columns.items()
                if name != weight
            }
            for start, stop in itertools.pairwise((0, *ends))
        ]


def _mean(values: Sequence[float], weights: Sequence[float], kind: type[np.floating]) -> float:
    total = kind(0.0)
    for value, weight in zip(values, weights, strict=True):
        total += kind(value) * kind(weight)
    return float(total / kind(sum(weights)))
