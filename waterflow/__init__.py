"""Co-train several PyTorch jobs in one process under one memory budget."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "allocator_ext").is_dir() and (_ROOT / "setup.py").is_file():
    # A source checkout that Python found by itself (``python -m`` from its root): the subpackages
    # lie beside this folder there, and are installed under it everywhere else.
    __path__.append(str(_ROOT))

# After the path is set, hence not at the top.
from waterflow.eager import run_eager
from waterflow.engine import Engine, JobHandle
from waterflow.job import STOP, Job, StepResult
from waterflow.partitioner.errors import (
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
from waterflow.report import JobReport, Report
from waterflow.running import run
from waterflow.study import MaxBatch, Pair, Plan, max_batch, pair, plan

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
