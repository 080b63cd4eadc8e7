"""How much slower a job is beside others than alone, from turns that follow each other closely.

On a shared machine what a step takes wanders over seconds and minutes, by far more than the harm
that is to be seen; from one moment to the next it hardly does. So the others are held for a moment
and let go for a moment, again and again, and each turn beside them is compared with the turns alone
just before and just after it: what makes the machine steadily slower or faster cancels out.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable
from itertools import pairwise
from typing import NamedTuple

#: Stretches of steps that do not count after the others were held or let go: work of theirs may
#: still go on, or not have begun. How many is left to chance: else turns keep step with the job's
#: epochs, and those alone have other parts of them than those beside the others.
_SETTLING = (1, 2)
#: A turn alone takes at least so long, and one beside the others.
_ALONE_SECONDS, _BESIDE_SECONDS = 0.005, 0.015
#: Of one comparison no more counts, either way: a pause of the whole process is nobody's harm.
_OUTLIER = math.log(1.5)
#: Comparisons before anything is said, seconds of turns after which all is said that can be, and
#: the standard error that is good enough before.
_FEWEST, _MOST_SECONDS, _EXACT = 12, 2.0, 0.01
#: So many standard errors above what is tolerated are harm at once. Few comparisons do not know
#: their own error well: it is taken for greater by this over their number.
_SURE, _UNSURE = 3.0, 4.0

#: Seconds and steps of each kind.
_Turn = dict[Hashable, tuple[float, int]]


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
        self._turn: _Turn = defaultdict(lambda: (0.0, 0))
        self._beside: _Turn = {}  # the last turn beside the others
        self._chance = random.Random(0)
        self._settling = self._chance.randint(*_SETTLING)
        self._ratios: list[float] = []  # their logarithms, one for each turn beside the others
        self._mean, self._error = 0.0, math.inf  # of these
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
            alone = {kind: took / made for kind, (took, made) in self._turn.items()}
            self._compare(alone)
            self._alone.update(alone)
        else:
            self._beside = self._turn
        self._turn = defaultdict(lambda: (0.0, 0))
        self._settling = self._chance.randint(*_SETTLING)
        self.holds = not self.holds

    def _compare(self, after: dict[Hashable, float]) -> None:
        """The last turn beside the others, with the turns alone before it and after it; a kind of
        steps that was not made after it with what it took before it."""
        took = expected = 0.0
        for kind, (seconds, made) in self._beside.items():
            if (before := self._alone.get(kind)) is not None:
                took += seconds
                expected += made * (before + after.get(kind, before)) / 2
        if expected:
            self._ratios.append(max(-_OUTLIER, min(_OUTLIER, math.log(took / expected))))
            if len(self._ratios) >= _FEWEST:
                self._estimate()

    def _estimate(self) -> None:
        """The mean of the ratios and its standard error."""
        count = len(self._ratios)
        self._mean = sum(self._ratios) / count
        off = [ratio - self._mean for ratio in self._ratios]
        # A turn alone is in the ratios before it and after it, so these are not independent.
        spread = sum(one * one for one in off)
        spread += 2 * max(0.0, sum(one * next_one for one, next_one in pairwise(off)))
        self._error = (1 + _UNSURE / count) * math.sqrt(spread / count / (count - 1))

    @property
    def harm(self) -> Harm | None:
        """None as long as more turns would tell more. Asked after every step."""
        if len(self._ratios) < _FEWEST:
            return None
        mean, error = self._mean, self._error
        certain = mean - _SURE * error > self._tolerance
        if not (certain or error < _EXACT or self._seconds > _MOST_SECONDS):
            return None
        return Harm(math.expm1(mean), error)
