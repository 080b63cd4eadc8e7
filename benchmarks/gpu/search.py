"""The largest batch that is accepted: a bisection that a straight line hurries along."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: A search ends when the bracket is this share of the batch, or one batch size apart.
RESOLUTION = 0.01


@dataclass(frozen=True)
class Outcome:
    """One run: whether the batch was accepted, the bytes at its peak, and what else is known."""

    batch: int
    steps: int
    accepted: bool
    peak_bytes: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Search:
    """Finds the largest batch whose test of many steps is accepted.

    `accepted` and `refused` bracket it by runs of few steps. Nothing is taken for granted: `batch`
    is the largest that ran, in a test if there was time for one (`tested`).
    """

    attempt: Callable[[int, int], Outcome]
    guess: int
    budget: int
    deadline: float
    search_steps: int
    test_steps: int
    outcomes: list[Outcome] = field(default_factory=list)
    accepted: int = 0
    refused: int | None = None
    batch: int | None = None
    tested: bool = False
    stopped_by: str | None = None
    misled: int = 0

    @property
    def unit(self) -> int:
        """The distance between two batches that the search still tells apart."""
        return max(1, int(RESOLUTION * (self.refused or max(self.guess, self.accepted))))

    def run(self) -> None:
        """Brackets the batch, then tests it, going down until the test is accepted."""
        while (candidate := self.propose()) is not None and self._has_time():
            self._note(self.attempt(candidate, self.search_steps))
        candidate = self.accepted
        while candidate > 0 and not self.tested and self._has_time():
            outcome = self.attempt(candidate, self.test_steps)
            self._note(outcome)
            self.tested = outcome.accepted
            self.batch = candidate if self.tested else self.batch
            candidate -= self.unit
        if self.batch is None and self.accepted:
            self.batch = self.accepted

    def _has_time(self) -> bool:
        if time.monotonic() < self.deadline:
            return True
        self.stopped_by = self.stopped_by or "its time limit"
        return False

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.accepted:
            self.accepted = max(self.accepted, outcome.batch)
        elif self.refused is None or outcome.batch < self.refused:
            # A test may refuse what two steps accepted; from then on the tests count.
            self.refused = outcome.batch
            self.accepted = max((o.batch for o in self.outcomes if self._stands(o)), default=0)

    def _stands(self, outcome: Outcome) -> bool:
        return outcome.accepted and (self.refused is None or outcome.batch < self.refused)

    def propose(self) -> int | None:
        """The next batch to try; None when the bracket is narrow enough."""
        if not self.outcomes:
            return self.guess
        if self.refused is not None and self.refused - self.accepted <= self.unit:
            return None
        if self.accepted == 0 and self.refused is not None:
            # The guess was a good one, most likely: down from it, ever faster.
            return int(self.refused * max(0.5, 1 - 0.04 * 2 ** len(self.outcomes)))
        top = 2 * self.accepted if self.refused is None else self.refused - 1
        middle = (self.accepted + top + 1) // 2
        line = self._line()
        if line is None:
            return middle
        if self.accepted < line <= top:
            self.misled = 0
            return line
        # Beside what has been tried already, ever further from it while the line proves wrong.
        step = self.unit * 2**self.misled
        self.misled += 1
        near = self.accepted + step if line <= self.accepted else top + 1 - step
        return near if self.accepted < near <= top else middle

    def _line(self) -> int | None:
        """Where a straight line through the two largest accepted peaks meets the budget."""
        known = {o.batch: o.peak_bytes for o in self.outcomes if o.accepted and o.peak_bytes}
        points = [(0, 0), *sorted(known.items())][-2:]
        (batch, peak), (next_batch, next_peak) = points[0], points[-1]
        if next_peak <= peak:
            return None
        return batch + int((self.budget - peak) * (next_batch - batch) / (next_peak - peak))
