"""Whether jobs do more side by side than in turns: packing that undoes itself (Gandiva, 3.4).

Pure functions of measured throughput. The engine asks them after it has tried both, the cluster's
simulator with figures of tables.
"""

from __future__ import annotations

from collections.abc import Sequence


def packing_gain(packed: Sequence[float], alone: Sequence[float]) -> float:
    """What jobs do side by side over what they do one after another: above 1.0 packing pays.

    Args:
        packed: steps a second of each job while all run side by side.
        alone: steps a second of each while nobody else runs.
    """
    return sum(p / a for p, a in zip(packed, alone, strict=True))


def packing_pays(packed: Sequence[float], alone: Sequence[float]) -> bool:
    """Whether jobs do more at once than in turns; both are steps per second, for each of them."""
    return packing_gain(packed, alone) > 1.0
