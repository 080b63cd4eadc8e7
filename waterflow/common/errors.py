"""Every error that waterflow raises on purpose, under one base class.

They live at the bottom of the package so that any layer can raise them; users import them from
``waterflow`` itself. A message says what was expected, what was there, and the remedy.
"""

from __future__ import annotations

from typing import Any


class WaterflowError(Exception):
    """Base of all errors that waterflow raises on purpose."""


class JobError(WaterflowError, ValueError):
    """A job, or a combination of jobs, is described wrongly; names the job and the value."""


class RunOnlyError(JobError):
    """A job's memory is known only by running it: no part of its step can be captured."""


class ConstantShapesError(JobError):
    """A factory makes the same job whatever the batch size that it is given."""


class CaptureError(WaterflowError, RuntimeError):
    """A training step cannot be captured exactly; names the line, the reason, the ways out.

    Attributes:
        reason: the reason and the line alone, as a report's note has them; None if not known.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class NumbersDifferError(WaterflowError, ArithmeticError):
    """A captured step gave other numbers than the eager step, after it had been in use.

    The job ends: some of its steps may have been wrong. Always a defect of waterflow, or of state
    that no program can see; names the job, the step and what differed.
    """


class OpaqueStepWarning(UserWarning):
    """A job's steps run as eager Python because they cannot be captured exactly; says why."""


class CacheWarning(UserWarning):
    """The cache on disk cannot be used, or not all of it; says why. It costs time, nothing else."""


class ReportWarning(UserWarning):
    """A part of a report is not written; says why. The rest is."""


class BudgetError(WaterflowError, MemoryError):
    """The jobs do not fit the memory budget even one after another; nothing has run."""


class PlanError(WaterflowError, RuntimeError):
    """A schedule breaks the order, the budget or completeness; a defect, never the user's fault."""


class DeviceLostError(WaterflowError, RuntimeError):
    """A device fails every call for good; ``report`` is the run until then, None if there is none.

    A CUDA context that a kernel has broken takes all jobs of the process along.
    """

    report: Any = None


class CheckpointError(WaterflowError, ValueError):
    """A checkpoint cannot be used for these jobs; names the job, the value and the remedy.

    It is of another model or other code, damaged, missing, or of another version. Nothing has run,
    and no job has been changed.
    """


class CheckpointWarning(UserWarning):
    """A job's checkpoint could not be taken or written; says why. The job goes on, and the former
    checkpoint stays."""


class NonFiniteLossError(WaterflowError, ArithmeticError):
    """A job's loss became NaN or infinite and the job asked to stop on that."""


class ReportError(WaterflowError, ValueError):
    """A saved report cannot be read; names the file and what is wrong with it."""
