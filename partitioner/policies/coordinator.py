"""How fast jobs may run beside one that must not notice them: a feedback rule (AntMan, 3.3).

A guaranteed job runs as if it were alone. Others beside it have a *duty*, the share of its time in
which they may work. The rule is told now and then how much slower than alone the guaranteed job has
been, and answers with the next duty. It is pessimistic: it cuts at once and by much, goes up step
by step, and halves what is left between a duty that did no harm and one that did, until that is too
little to matter. So it comes to rest near the largest duty that does no harm, however that depends
on the jobs.

Pure functions: the engine asks them with times that it has measured, the cluster's simulator with
those of tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

#: By how much a guaranteed job may be slower than alone.
TOLERANCE = 0.01

#: The duty of jobs of which nothing is known yet, and by how much it goes up at least where none
#: did harm: it doubles.
_FIRST, _STEP = 0.25, 0.125
#: Windows without harm before a raise towards a duty that did harm; and before that is tried again.
_PATIENCE, _FORGETS_AFTER = 2, 32
#: Differences of duties that do not matter.
_RESOLUTION = 0.02
#: A cut leaves at most, and at least, these shares of a duty.
_LEAST_CUT, _MOST_CUT = 0.5, 0.125


class Pace(NamedTuple):
    """What is known of the jobs beside a guaranteed one.

    Attributes:
        duty: the share of its time in which they may work, 0 to 1.
        harmless: the largest duty that is known to do no harm.
        harmful: the smallest that is known to do harm; infinite where none is.
        calm: windows without harm since the duty was changed.
    """

    duty: float = _FIRST
    harmless: float = 0.0
    harmful: float = math.inf
    calm: int = 0


def next_pace(
    pace: Pace, slowdown: float, error: float = 0.0, tolerance: float = TOLERANCE
) -> Pace:
    """The pace after a window of time.

    Args:
        pace: that of the window.
        slowdown: by how much the guaranteed job was slower in it than alone: 0.02 is 2 %.
        error: the standard error of that; less than this above the tolerance counts as none.
        tolerance: what it may lose.
    """
    if slowdown > tolerance + error:
        return _cut(pace, tolerance / slowdown)
    return _raised(pace._replace(harmless=max(pace.harmless, pace.duty), calm=pace.calm + 1))


def _cut(pace: Pace, by: float) -> Pace:
    harmful = min(pace.harmful, pace.duty)
    if 0.0 < pace.harmless < pace.duty:
        return Pace(pace.harmless, pace.harmless, harmful)
    duty = pace.duty * min(_LEAST_CUT, max(_MOST_CUT, by))
    return Pace(duty if duty > _RESOLUTION / 4 else 0.0, 0.0, harmful)


def _raised(pace: Pace) -> Pace:
    if pace.duty >= 1.0:
        return pace
    if math.isinf(pace.harmful):
        return Pace(min(1.0, max(2 * pace.duty, pace.duty + _STEP)), pace.harmless)
    gap = pace.harmful - pace.duty
    if pace.calm < _PATIENCE:
        return pace
    if gap > max(_RESOLUTION, pace.duty / 10):
        return Pace(pace.duty + gap / 2, pace.harmless, pace.harmful)
    if pace.calm < _FORGETS_AFTER:
        return pace
    harmful = pace.harmful + _STEP
    return Pace(pace.duty, pace.harmless, harmful if harmful < 1.0 else math.inf)


def settled_duty(
    slowdown_at: Callable[[float], float], tolerance: float = TOLERANCE, windows: int = 200
) -> float:
    """The duty at which the rule comes to rest, where a duty's slowdown is known.

    Args:
        slowdown_at: the guaranteed job's slowdown while others have this duty; does not fall.
        tolerance: what it may lose.
        windows: at most so many are tried.
    """
    pace = Pace()
    for _ in range(windows):
        pace = next_pace(pace, slowdown_at(pace.duty), tolerance=tolerance)
    return pace.harmless if slowdown_at(pace.duty) > tolerance else pace.duty
