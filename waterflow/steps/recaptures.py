"""Captures that replace others: when they are made, up to where they cost more than they save."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from waterflow.capture.assumptions import Assumptions
from waterflow.capture.set_numbers import SetNumbers
from waterflow.common.errors import CaptureError
from waterflow.steps.prepared import Specialization

#: A job whose captures have gone stale more often than this runs eagerly, but for those that are
#: known to have saved what they took.
_MOST_RECAPTURES = 32
#: One whose captures go stale within so few steps, or before they have saved what they took, does,
#: too, the third time.
_HASTY_RUNS, _MOST_HASTY = 8, 2


class StillChangingError(Exception):
    """No error: what a step reads has not stayed as it is for long enough yet, so that its steps on
    such batches are eager meanwhile.

    Attributes:
        what: that is, in a user's words.
        steps: after so many eager steps it is time to look again.
    """

    def __init__(self, what: str, steps: int) -> None:
        super().__init__(what, steps)
        self.what, self.steps = what, steps


@dataclass
class _Wait:
    """Of steps on batches of one signature, for what they read to settle.

    Attributes:
        state: what it was when the wait began; None where none is under way.
        steps: how many the latest wait is for, which is twice as many as the one before.
    """

    state: Assumptions | SetNumbers | None
    steps: int


class Recaptures:
    """A job's captures that were made because something that a step reads had changed.

    Attributes:
        count: how many there were.
    """

    def __init__(
        self, job_name: str, set_numbers: Callable[[], SetNumbers | None] = lambda: None
    ) -> None:
        """Takes the job's name, and what tells which numbers its callback sets."""
        self._job_name = job_name
        self._set_numbers = set_numbers
        self.count = 0
        self._hasty = 0
        self._unpaid = 0  # not known to have saved what they took
        self._dropped = 0  # captures that went with the optimizer's state
        self._waits: dict[Hashable, _Wait] = {}

    def wait_for(
        self, signature: Hashable, former: Specialization | None, runs_to_pay: float
    ) -> None:
        """Before a capture for such batches: where the former one went stale before it had saved
        what it took, what has changed has to stay as it is for as many steps as a capture needs
        for that, and for twice as many each time that it has not. What changes every few steps, as
        an annealed weight of a loss does, would have one capture after another made in vain; what
        settles is captured then.

        The first that goes stale within a few steps waits for nothing: a number may go back and
        forth, and both captures are kept. Where the job's callback is seen to set a number that its
        steps read, the first capture of all waits as if one had gone stale.

        Args:
            signature: of the batches.
            former: the capture before, None where there is none.
            runs_to_pay: see `count_after`.

        Raises:
            StillChangingError: these steps stay eager for now.
        """
        wait = self._waits.get(signature)
        before = None if wait is None else wait.state
        if wait is not None and before is not None and before.hold():
            wait.state = None
            self.count += not isinstance(before, SetNumbers)  # that one comes before the first
            return
        if before is None:
            runs = 0 if former is None else former.runs
            if not runs < runs_to_pay < math.inf or (former is None and wait is not None):
                return
            if former is not None and runs < _HASTY_RUNS and not self._hasty:
                return
            before = self._set_numbers() if former is None else former.assumptions
        now = None if before is None else before.taken_anew()
        if now is None:
            return
        if isinstance(before, SetNumbers):
            what = f"its callback sets {before.text}, which may change"
        else:
            assert before is not None
            what = f"{before.difference() or 'what the step reads'} changes"
        wait = _Wait(now, math.ceil(runs_to_pay) if wait is None else 2 * wait.steps)
        self._waits[signature] = wait
        raise StillChangingError(what, wait.steps)

    def note_dropped(self) -> None:
        """All captures have gone: the next one counts."""
        self._dropped += 1

    def count_dropped(self) -> None:
        """Before a capture: those that have gone are counted."""
        self.count, self._dropped = self.count + self._dropped, 0

    def count_after(self, former: Specialization, runs_to_pay: float = 0.0) -> None:
        """Before a capture that is to follow a former one for such batches.

        Args:
            former: that one.
            runs_to_pay: how many steps save what a capture takes, as far as that is known.

        Raises:
            CaptureError: there have been too many, or too many in haste.
        """
        if former.outgrown:  # trials have come between
            return
        former.outgrown = True
        self.count += 1
        self._unpaid += not 0 < runs_to_pay <= former.runs
        self._hasty += former.runs < max(runs_to_pay, _HASTY_RUNS)
        if self._unpaid > _MOST_RECAPTURES or self._hasty > _MOST_HASTY:
            changed = former.assumptions.difference() or "what the step reads"
            raise CaptureError(
                f"job {self._job_name!r}: {changed} has changed {self.count} times, and each "
                "time needs a capture of its own. Make it a tensor (a buffer of the model), or "
                "give the job capture=False.",
                f"{changed} changes too often for captures",
            )
