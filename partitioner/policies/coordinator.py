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

#: The duty of jobs of which nothing is known yet. It doubles where no duty did harm.
_FIRST = 0.25
#: Windows without harm before a raise towards a duty that did harm. That one is tried again after
#: two of them, or four, eight and so on, the more often it did harm: at most so many doublings.
_PATIENCE, _MOST_FAILURES = 2, 6
#: A duty that did no harm and then did is tried again at the latest as if it had failed so often:
#: a machine that is slow for a moment, again and again, must not lead down step by step.
_SOON_AGAIN = 3
#: Harm is told by cumulative sums (Page, Continuous Inspection Schemes, Biometrika 41, 1954): of
#: the standard errors by which windows were above the tolerance, less what chance has them be. One
#: that is one and a half above is enough, or two that are one above.
_EXPECTED, _TOO_MUCH = 0.25, 1.25
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
        failures: how often in a row a duty was tried that did harm.
        doubt: what windows have told against the duty that by itself is too little to cut it.
    """

    duty: float = _FIRST
    harmless: float = 0.0
    harmful: float = math.inf
    calm: int = 0
    failures: int = 0
    doubt: float = 0.0


def next_pace(
    pace: Pace, slowdown: float, error: float = 0.0, tolerance: float = TOLERANCE
) -> Pace:
    """The pace after a window of time.

    Args:
        pace: that of the window.
        slowdown: by how much the guaranteed job was slower in it than alone: 0.02 is 2 %.
        error: the standard error of that.
        tolerance: what it may lose.
    """
    above = slowdown - tolerance
    errors = above / error if error else math.copysign(math.inf, above)
    doubt = max(0.0, pace.doubt + errors - _EXPECTED)
    if above > 0 and doubt >= _TOO_MUCH:
        return _cut(pace, tolerance / slowdown)
    pace = pace._replace(doubt=doubt)
    if above > 0:  # perhaps
        return pace
    pace = pace._replace(harmless=max(pace.harmless, pace.duty), calm=pace.calm + 1)
    if pace.duty >= pace.harmful and pace.calm >= _PATIENCE:  # what did harm there is over
        pace = pace._replace(harmful=math.inf, failures=0)
    return _raised(pace)


def _cut(pace: Pace, by: float) -> Pace:
    if 0.0 < pace.harmless < pace.duty:
        failures = min(pace.failures + 1, _MOST_FAILURES)
        return Pace(pace.harmless, pace.harmless, min(pace.harmful, pace.duty), failures=failures)
    failures = min(pace.failures, _SOON_AGAIN)
    if pace.harmless:  # it did none here before: most often the machine is slow for a moment
        return Pace(_LEAST_CUT * pace.duty, 0.0, min(pace.harmful, pace.duty), failures=failures)
    # None is known to do no harm. Where the first of them that did is tried again, it is told
    # whether the moment is over.
    harmful = pace.duty if math.isinf(pace.harmful) else pace.harmful
    duty = pace.duty * min(_LEAST_CUT, max(_MOST_CUT, by))
    return Pace(duty if duty > _RESOLUTION / 4 else 0.0, 0.0, harmful, failures=failures)


def _raised(pace: Pace) -> Pace:
    if pace.duty >= 1.0:
        return pace
    if math.isinf(pace.harmful):
        return pace._replace(duty=min(1.0, 2 * max(pace.duty, _RESOLUTION)), calm=0, doubt=0.0)
    if pace.duty < pace.harmful and pace.calm >= 2**pace.failures:
        return pace._replace(duty=pace.harmful, calm=0, doubt=0.0)
    gap = pace.harmful - pace.duty  # 0 where it is tried again
    if gap > max(_RESOLUTION, pace.duty / 10) and pace.calm >= _PATIENCE:
        return pace._replace(duty=pace.duty + gap / 2, calm=0, doubt=0.0)
    return pace


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
