"""How much slower a job is beside others than alone, from turns that follow each other closely.

On a shared machine what a step takes wanders over seconds and minutes, by far more than the harm
that is to be seen; from one moment to the next it hardly does. So the others are held for a moment
and let go for a moment, again and again, and each turn beside them is compared with the turn alone
just before it: what changes the machine for longer than that cancels out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

#: Stretches of steps that do not count after the others were held or let go: work of theirs may
#: still go on, or not have begun.
_SETTLING = 1
#: A turn alone takes at least so long, and one beside the others.
_ALONE_SECONDS, _BESIDE_SECONDS = 0.005, 0.015
#: Of one comparison no more counts, either way: a pause of the whole process is nobody's harm.
_OUTLIER = math.log(1.5)
#: Comparisons before anything is said, seconds of turns after which all is said that can be, and
#: the standard error that is good enough before.
_FEWEST, _MOST_SECONDS, _EXACT = 6, 2.0, 0.01
#: So many standard errors above what is tolerated are harm at once; few comparisons ask for more,
#: as their error is itself not known well.
_SURE, _UNSURE = 3.0, 12.0


class Harm(NamedTuple):
    """By how much a job was slower than alone, 0.01 is 1 %, and the standard error of that."""

    slowdown: float
    error: float


class Alternation:
    """Of one job and those beside it, from its beginning until the harm is told.

    Args:
        tolerance: the slowdown that is no harm.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._alone: dict[Hashable, float] = {}  # seconds a step, when last made alone
        self._turn: dict[Hashable, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        self._settling = _SETTLING
        self._count, self._sum, self._squares = 0, 0.0, 0.0  # of logarithms of ratios
        self._seconds = 0.0
        self.holds = True  # whether the others are to be held now

    def note(self, kind: Hashable, seconds: float, steps: int, *, disturbed: bool = False) -> None:
        """The job has made some steps.

        Args:
            kind: of these steps; only equal kinds are compared.
            seconds: that they have taken.
            steps: at least one.
            disturbed: whether others still worked at their beginning who cannot be held at once.
        """
        if self.holds and disturbed:
            return
        if self._settling:
            self._settling -= 1
            return
        before, made = self._turn[kind]
        self._turn[kind] = before + seconds, made + steps
        self._seconds += seconds
        least = _ALONE_SECONDS if self.holds else _BESIDE_SECONDS
        if sum(taken for taken, _ in self._turn.values()) >= least:
            self._end_turn()

    def _end_turn(self) -> None:
        if self.holds:
            self._alone.update({kind: took / made for kind, (took, made) in self._turn.items()})
        else:
            self._compare()
        self._turn.clear()
        self._settling = _SETTLING
        self.holds = not self.holds

    def _compare(self) -> None:
        known = {kind: turn for kind, turn in self._turn.items() if kind in self._alone}
        if not known:
            return
        expected = sum(self._alone[kind] * made for kind, (_, made) in known.items())
        ratio = math.log(sum(took for took, _ in known.values()) / expected)
        ratio = max(-_OUTLIER, min(_OUTLIER, ratio))
        self._count += 1
        self._sum += ratio
        self._squares += ratio**2

    @property
    def harm(self) -> Harm | None:
        """None as long as more turns would tell more."""
        if self._count < _FEWEST:
            return None
        mean = self._sum / self._count
        spread = max(0.0, self._squares / self._count - mean**2)
        error = math.sqrt(spread / (self._count - 1))
        certain = mean - (_SURE + _UNSURE / self._count) * error > self._tolerance
        if not (certain or error < _EXACT or self._seconds > _MOST_SECONDS):
            return None
        return Harm(math.expm1(mean), error)
