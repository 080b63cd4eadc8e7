"""A user's file of jobs: a Python file whose function `jobs()` returns a list of `wf.Job`.

It runs as a script would, with its own folder on the import path, but under a private module name,
so that a file called `torch.py` or `report.py` replaces nothing.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from waterflow.common.errors import JobError
from waterflow.job.job import Job

T = TypeVar("T")

_MODULE = "_waterflow_jobs_file"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A loaded file: `make_jobs` returns fresh jobs each time, `memory` is its MEMORY or None."""

    path: Path
    make_jobs: Callable[[], Sequence[Job]]
    memory: str | int | None


def load_job_file(path: str | os.PathLike[str]) -> JobFile:
    """Run the file at `path` and return its jobs function.

    Raises JobError, which names the file and the line, if it is missing, raises, or has no
    `jobs()`. `make_jobs` raises JobError likewise, and if the jobs are not a list of at least one
    `wf.Job`.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise JobError(f"{path} {what}: give a Python file with a function jobs()")
    module = _execute(path.resolve(), path)
    function = getattr(module, "jobs", None)
    if not callable(function):
        raise JobError(f"{path} has no function jobs() that returns a list of wf.Job")
    return JobFile(
        path=path,
        make_jobs=lambda: _checked(path, _call(path, function)),
        memory=getattr(module, "MEMORY", None),
    )


def load_job_function(path: str | os.PathLike[str], name: str) -> Callable[[int], Job]:
    """Run the file at `path` and return its function `name`, which makes a job for a batch size.

    Raises JobError, which names the file and the line, if the file is missing, raises, or has no
    such function. So does the function that is returned, if the user's raises or returns no job.
    """
    path = Path(path)
    if not path.is_file():
        raise JobError(f"{path} does not exist: give a Python file with a function {name}(batch)")
    module = _execute(path.resolve(), path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_own_function(module, value)]
        there = f"; it has {', '.join(own)}" if own else ""
        raise JobError(f"{path} has no function {name}(batch) that returns a wf.Job{there}")
    if not _takes_one(function):
        raise JobError(
            f"{path}: {name}() is given no batch size: let it be {name}(batch), which returns a "
            f"wf.Job; the file alone ({path}) stands for what its jobs() returns"
        )
    return _checked_factory(path, name, function)


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(1)
    except TypeError:
        return False
    except ValueError:  # of a kind that has no signature
        return True
    return True


def _checked_factory(path: Path, name: str, function: Callable[[int], Any]) -> Callable[[int], Job]:
    @functools.wraps(function)
    def make(batch: int) -> Job:
        job = _call(path, lambda: function(batch))
        if not isinstance(job, Job):
            raise JobError(f"{path}: {name}({batch}) returned no wf.Job but {type(job).__name__}")
        return job

    return make


def _is_own_function(module: ModuleType, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _execute(path: Path, shown: Path) -> ModuleType:
    # The loader is named, because by suffix alone only ".py" would be accepted.
    loader = importlib.machinery.SourceFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Where pickle and dataclasses look for it; DataLoader workers are forked and find it too.
    sys.modules[_MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _call(shown, lambda: loader.exec_module(module))
    return module


def _call(path: Path, function: Callable[[], T]) -> T:
    try:
        return function()
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())
        where = f"{path}{_line_of(path, error)}"
        raise JobError(f"{where}: {type(error).__name__}: {message}") from error


def _line_of(path: Path, error: BaseException) -> str:
    """Return ", line 12" for the innermost line of the user's file that led to the error."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    return f", line {lines[-1]}" if lines else ""


def _checked(path: Path, jobs: Any) -> list[Job]:
    if not isinstance(jobs, Sequence) or isinstance(jobs, str):
        raise JobError(f"{path}: jobs() must return a list of wf.Job, not {type(jobs).__name__}")
    if not jobs:
        raise JobError(f"{path}: jobs() returned no job")
    for index, job in enumerate(jobs):
        if not isinstance(job, Job):
            raise JobError(f"{path}: jobs()[{index}] is not a wf.Job but {type(job).__name__}")
    return list(jobs)
