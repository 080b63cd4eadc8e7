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


class BudgetError(WaterflowError, MemoryError):
    """The jobs do not fit the memory budget even one after another; nothing has run."""


class BudgetWarning(UserWarning):
    """The memory budget is more than there is: jobs that fill it may be killed; says how much."""


class JobFailedError(WaterflowError, RuntimeError):
    """A job of a report that was read from a file had failed; says how.

    `Report.raise_errors` raises it in place of the error itself, which is no more.
    """


class JobFailedWarning(UserWarning):
    """A job has failed, and the others go on; one line with its error. Its report has all of it."""


class SharingWarning(UserWarning):
    """Jobs have a Python object in common that one of them may change, so they train one after
    another; says which, and the remedy. It costs time, nothing else."""


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


class NonFiniteLossWarning(UserWarning):
    """A job's loss has become NaN or infinite; the job trains on, as it was not asked to stop."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run; ``report`` is the run until then.

    A KeyboardInterrupt, so that it ends whatever the run was part of: a notebook's cell, a loop
    over runs. Whoever wants the report and no more catches it.
    """

    report: Any = None


class ReportWarning(UserWarning):
    """A saved report has been replaced, or a part of one is not written; says which."""


class ReportError(WaterflowError, ValueError):
    """A saved report cannot be read; names the file and what is wrong with it."""
