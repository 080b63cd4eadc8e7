"""How much of a job's step runs as eager Python, and why: what its report says of it."""

from __future__ import annotations

import contextlib
import warnings

from waterflow.capture.tracing import capture_error, users_line
from waterflow.common.errors import OpaqueStepWarning
from waterflow.job.job import Job


class Opacity:
    """What of a job's step is not captured.

    Attributes:
        step: why all steps run eagerly, None where they are captured.
        optimizer: why the optimizer runs eagerly, None where it is captured.
        optimizer_reason: the same without its name.
        notes: what the report should say about the job.

    What was given up because a trace has failed is said once the user's own Python has done the
    same without an error (`is_proved`): else the error is the user's, and no limit of captures.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.step: str | None = None
        self.optimizer: str | None = None
        self.optimizer_reason: str | None = None
        self.notes: list[str] = []
        self._unproved: list[str] = []

    @property
    def is_proved(self) -> bool:
        """Whether all that was given up was given up for a reason that is known to be right."""
        return not self._unproved

    def prove(self) -> None:
        """An eager step has been made: that it cannot be captured is captures' own limit."""
        while self._unproved:
            self.note(self._unproved.pop(0))

    @property
    def reason(self) -> str | None:
        """Why its steps are eager Python, wholly or in part; None where all of them is captured."""
        return self.step or self.optimizer_reason

    def give_up_step(self, reason: str, proved: bool = True) -> None:
        """From now on the job's steps run eagerly.

        Args:
            reason: why.
            proved: whether that is known to be why; else it is said once an eager step was made.

        Raises:
            CaptureError: the job insists on capture.
        """
        if self._job.capture is True:
            raise capture_error(self._job.name, reason, users_line(None, self._job.function))
        self.step = reason
        self._say(f"the step runs as eager Python, because {reason}", proved)

    def give_up_optimizer(self, why: str, proved: bool = True) -> None:
        """From now on the optimizer runs eagerly, after captured forward and backward passes."""
        name = type(self._job.optimizer).__name__
        self.optimizer_reason = why
        self.optimizer = f"{name} cannot be captured exactly: {why}"
        self._say(f"the optimizer runs as eager Python, because {self.optimizer}", proved)

    def _say(self, text: str, proved: bool) -> None:
        if proved:
            self.note(text)
        else:
            self._unproved.append(text)

    def note(self, text: str) -> None:
        """Has the report say this, and warns once."""
        if text in self.notes:
            return
        self.notes.append(text)
        with contextlib.suppress(Warning):  # filters may turn it into an error
            warnings.warn(f"job {self._job.name!r}: {text}", OpaqueStepWarning, stacklevel=2)
