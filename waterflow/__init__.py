"""Co-train several PyTorch jobs in one process under one memory budget."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

if find_spec("waterflow.executor") is None:
    # A source checkout that Python found by itself (``python -m`` from its root): the subpackages
    # lie beside this folder there, and are installed under it everywhere else.
    __path__.append(str(Path(__file__).resolve().parent.parent))

# After the path is set, hence not at the top.
from waterflow.common.errors import (
    BudgetError,
    CaptureError,
    DeviceLostError,
    JobError,
    NonFiniteLossError,
    NumbersDifferError,
    OpaqueStepWarning,
    PlanError,
    ReportError,
    WaterflowError,
)
from waterflow.engine.engine import Engine
from waterflow.engine.handle import JobHandle
from waterflow.engine.run import run
from waterflow.job.job import STOP, Job, StepResult
from waterflow.job.training_step import run_eager
from waterflow.report.report import JobReport, Report
from waterflow.study.study import MaxBatch, Pair, Plan, max_batch, pair, plan

__all__ = [
    "STOP",
    "BudgetError",
    "CaptureError",
    "DeviceLostError",
    "Engine",
    "Job",
    "JobError",
    "JobHandle",
    "JobReport",
    "MaxBatch",
    "NonFiniteLossError",
    "NumbersDifferError",
    "OpaqueStepWarning",
    "Pair",
    "Plan",
    "PlanError",
    "Report",
    "ReportError",
    "StepResult",
    "WaterflowError",
    "max_batch",
    "pair",
    "plan",
    "run",
    "run_eager",
]
