"""Co-train several PyTorch jobs in one process under one memory budget.

Importing it loads nothing else: each public name is imported when it is first used (PEP 562), as
torch and all that comes with it take seconds, which a command line's help has no use for.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if find_spec("waterflow.executor") is None:
    # A source checkout that Python found by itself (``python -m`` from its root): the subpackages
    # lie beside this folder there, and are installed under it everywhere else.
    __path__.append(str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from waterflow.common.errors import (
        BudgetError,
        BudgetWarning,
        CacheWarning,
        CaptureError,
        CheckpointError,
        CheckpointWarning,
        DeviceLostError,
        JobError,
        JobFailedError,
        JobFailedWarning,
        NonFiniteLossError,
        NonFiniteLossWarning,
        NumbersDifferError,
        OpaqueStepWarning,
        PlanError,
        ReportError,
        ReportWarning,
        RunInterrupted,
        SharingWarning,
        WaterflowError,
    )
    from waterflow.engine.engine import Engine
    from waterflow.engine.handle import JobHandle, as_completed
    from waterflow.engine.run import run
    from waterflow.engine.shared import shared
    from waterflow.integrations.lightning import from_lightning
    from waterflow.integrations.transformers import from_trainer
    from waterflow.job.job import STOP, Job, StepResult
    from waterflow.job.training_step import run_eager
    from waterflow.report.job_report import JobReport
    from waterflow.report.report import Report
    from waterflow.study.max_batch import max_batch
    from waterflow.study.pair import pair
    from waterflow.study.plan import plan
    from waterflow.study.results import MaxBatch, Pair, Plan

__all__ = [
    "STOP",
    "BudgetError",
    "BudgetWarning",
    "CacheWarning",
    "CaptureError",
    "CheckpointError",
    "CheckpointWarning",
    "DeviceLostError",
    "Engine",
    "Job",
    "JobError",
    "JobFailedError",
    "JobFailedWarning",
    "JobHandle",
    "JobReport",
    "MaxBatch",
    "NonFiniteLossError",
    "NonFiniteLossWarning",
    "NumbersDifferError",
    "OpaqueStepWarning",
    "Pair",
    "Plan",
    "PlanError",
    "Report",
    "ReportError",
    "ReportWarning",
    "RunInterrupted",
    "SharingWarning",
    "StepResult",
    "WaterflowError",
    "as_completed",
    "from_lightning",
    "from_trainer",
    "max_batch",
    "pair",
    "plan",
    "run",
    "run_eager",
    "shared",
]

#: Where each name comes from; a test holds it to the imports above.
_NAMES = {
    "common.errors": (
        "BudgetError BudgetWarning CacheWarning CaptureError CheckpointError CheckpointWarning "
        "DeviceLostError JobError JobFailedError JobFailedWarning NonFiniteLossError "
        "NonFiniteLossWarning NumbersDifferError OpaqueStepWarning PlanError ReportError "
        "ReportWarning RunInterrupted SharingWarning WaterflowError"
    ),
    "engine.engine": "Engine",
    "engine.handle": "JobHandle as_completed",
    "engine.run": "run",
    "engine.shared": "shared",
    "integrations.lightning": "from_lightning",
    "integrations.transformers": "from_trainer",
    "job.job": "STOP Job StepResult",
    "job.training_step": "run_eager",
    "report.job_report": "JobReport",
    "report.report": "Report",
    "study.max_batch": "max_batch",
    "study.pair": "pair",
    "study.plan": "plan",
    "study.results": "MaxBatch Pair Plan",
}
_MODULES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}
#: Modules that are reached as attributes, once they are used.
_PACKAGES = {
    "cluster": f"{__name__}.cluster",
    "optuna": f"{__name__}.integrations.optuna",
}

if not TYPE_CHECKING:  # type checkers would believe that every name is there

    def _imported(name: str) -> Any:
        """A module, with all that comes along: none of it is garbage, and to look through what
        torch has brought took a third of the time."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return importlib.import_module(name)
        finally:
            if collects:
                gc.enable()

    def __getattr__(name: str) -> Any:
        """Import a public name, and make those known that have come along.

        All of them: what a job's Python uses while it trains must not be imported by it, or the
        import would count as part of the step.
        """
        if name in _PACKAGES:  # not a name of one: `wf.cluster.simulate`
            return importlib.import_module(_PACKAGES[name])
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_imported(_MODULES[name]), name)
        for other, module in _MODULES.items():
            loaded = vars(sys.modules[module]) if module in sys.modules else {}
            if other in loaded:
                globals().setdefault(other, loaded[other])
        return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
