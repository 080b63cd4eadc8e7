"""Counts captures that replace others, up to where they cost more than they save."""

from __future__ import annotations

from waterflow.common.errors import CaptureError
from waterflow.steps.prepared import Specialization

#: A job whose captures have gone stale more often than this runs eagerly, but for those that are
#: known to have saved what they took.
_MOST_RECAPTURES = 32
#: One whose captures go stale within so few steps, or before they have saved what they took, does,
#: too, the third time.
_HASTY_RUNS, _MOST_HASTY = 8, 2


class Recaptures:
    """A job's captures that were made because something that a step reads had changed.

    Attributes:
        count: how many there were.
    """

    def __init__(self, job_name: str) -> None:
        self._job_name = job_name
        self.count = 0
        self._hasty = 0
        self._unpaid = 0  # not known to have saved what they took
        self._dropped = 0  # captures that went with the optimizer's state

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
