"""`waterflow demo`: a dozen trials in one process, checked against the plain eager loop.

It learns what each job needs alone, takes a budget below the sum of that, trains the jobs together,
and then trains fresh copies of them by the eager loop, one after another. Nothing is assumed: what
it prints was measured on this machine, a loss of speed as well as a gain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from waterflow.cli.compare import equal_losses
from waterflow.cli.demo_jobs import Size, Task, make_tasks
from waterflow.common.errors import RunInterrupted
from waterflow.common.units import format_bytes, format_seconds, parse_bytes
from waterflow.engine.run import run
from waterflow.job.training_step import run_eager
from waterflow.report.json_fields import encode_float
from waterflow.report.report import JobReport, Report
from waterflow.report.table import Column, FittedTable

#: The budget, as a share of what the jobs would need side by side.
_SHARE = 0.65
_LANES = 2
#: For one step of each job; the arena takes only what it uses of it.
_AMPLE_BYTES = 2**30
_DEFAULT_OUT = Path("waterflow-report")


@dataclass(frozen=True, kw_only=True)
class Eager:
    """The eager loop over all jobs, one after another, with `threads` threads per operator."""

    threads: int
    jobs: dict[str, JobReport]

    @property
    def seconds(self) -> float:
        """The time of all jobs together."""
        return sum(job.wall_seconds for job in self.jobs.values())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that was measured; `eager` begins with the run whose losses must be equal."""

    report: Report
    setup_seconds: float
    accuracies: dict[str, float]
    eager: Sequence[Eager]
    out: Path

    def is_equal(self, name: str) -> bool:
        """Whether every loss of the job equals the eager loop's, bit for bit."""
        return equal_losses(self.report[name], self.eager[0].jobs[name])

    @property
    def fastest_eager(self) -> Eager:
        """The eager run to beat: more threads are slower where the operators are small."""
        return min(self.eager, key=lambda eager: eager.seconds)

    @property
    def speedup(self) -> float:
        """How many times as fast as that the jobs were together, start-up included."""
        together = self.setup_seconds + self.report.seconds
        return self.fastest_eager.seconds / max(together, 1e-9)

    @property
    def ok(self) -> bool:
        """Whether no job failed, all losses are equal, and the budget held."""
        within = self.report.peak_bytes <= self.report.budget_bytes
        return self.report.ok and within and all(self.is_equal(job.name) for job in self.report)


def main(
    json: bool = False,
    memory: str | None = None,
    out: str | os.PathLike[str] | None = None,
    size: Size | None = None,
) -> int:
    """Run the demo and print what came of it; with `json`, one JSON document and nothing else.

    `memory` replaces the budget, `out` the folder of the report. Returns 0, 1 if a job failed or a
    loss differs, 130 after Ctrl-C. Raises BudgetError if a job does not fit in `memory` alone, and
    ModuleNotFoundError without scikit-learn.
    """
    size = size or Size()
    folder = Path(out) if out is not None else _DEFAULT_OUT
    # Diagnostics and progress to stderr: stdout is for the outcome.
    with contextlib.redirect_stdout(sys.stderr):
        outcome = _measure(size, memory, folder)
    if outcome is None:
        print("waterflow: interrupted, the demo is not complete", file=sys.stderr)
        return 130
    if json:
        print(dumps(_document(outcome), allow_nan=False))
    else:
        Console().print(_render(outcome))
    return 0 if outcome.ok else 1


def _measure(size: Size, memory: str | None, out: Path) -> Outcome | None:
    lane_threads = max(1, torch.get_num_threads() // _LANES)
    tasks = make_tasks(size)
    budget = parse_bytes(memory) if memory is not None else _choose_budget(size, lane_threads)
    if budget is None:
        return None
    _say(f"training {len(tasks)} jobs together in {format_bytes(budget)}")
    jobs = [task.job for task in tasks]
    try:
        wall, report = _timed(
            lambda: run(jobs, budget, lanes=_LANES, threads=lane_threads, progress=True)
        )
    except RunInterrupted as stopped:
        stopped.report.save(out, overwrite=True)
        return None
    report.save(out, overwrite=True)
    accuracies = {task.job.name: task.accuracy() for task in tasks}
    try:
        eager = [_run_eager(size, n) for n in sorted({lane_threads, torch.get_num_threads()})]
    except KeyboardInterrupt:
        return None
    return Outcome(
        report=report,
        setup_seconds=max(0.0, wall - report.seconds),
        accuracies=accuracies,
        eager=eager,
        out=out,
    )


def _choose_budget(size: Size, threads: int) -> int | None:
    """A budget that constrains: a share of the sum of the solo peaks. None after Ctrl-C."""
    _say("one step of each job, to learn what it needs alone")
    jobs = [task.job for task in make_tasks(size)]
    for job in jobs:
        job.steps = 1
        job.capture = True  # what the captured step needs is less than the eager one
    try:
        report = run(jobs, _AMPLE_BYTES, lanes=_LANES, threads=threads)
    except RunInterrupted:
        return None
    report.raise_errors()
    assert report.side_by_side_bytes is not None
    return int(report.side_by_side_bytes * _SHARE)


def _run_eager(size: Size, threads: int) -> Eager:
    _say(f"the same jobs, one after another, by the eager loop with {_threads(threads)}")
    tasks: list[Task] = make_tasks(size)
    reports = [run_eager(task.job, threads=threads) for task in tasks]
    return Eager(threads=threads, jobs={report.name: report for report in reports})


def _timed(action: Callable[[], Report]) -> tuple[float, Report]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _document(outcome: Outcome) -> dict[str, Any]:
    report = outcome.report
    return {
        "jobs": [
            {
                "name": job.name,
                "state": job.state,
                "error": job.error,
                "steps": job.steps,
                "first_loss": encode_float(job.losses[0]) if job.losses else None,
                "loss": encode_float(job.losses[-1]) if job.losses else None,
                "accuracy": outcome.accuracies[job.name],
                "solo_peak_bytes": job.solo_peak_bytes,
                "equal_to_eager": outcome.is_equal(job.name),
            }
            for job in report
        ],
        "peak_bytes": report.peak_bytes,
        "budget_bytes": report.budget_bytes,
        "side_by_side_bytes": report.side_by_side_bytes,
        "seconds": report.seconds,
        "setup_seconds": outcome.setup_seconds,
        "sequential_seconds": outcome.fastest_eager.seconds,
        "sequential_threads": outcome.fastest_eager.threads,
        "speedup": outcome.speedup,
        "eager": [{"threads": e.threads, "seconds": e.seconds} for e in outcome.eager],
        "equal_to_eager": all(outcome.is_equal(job.name) for job in report),
        "policy": report.policy,
        "lanes": report.lanes,
        "report": str(outcome.out),
    }


def _render(outcome: Outcome) -> RenderableType:
    headings = ("steps", "loss", "accuracy", "alone needs", "losses")
    title = f"{len(outcome.report)} jobs together"
    table = FittedTable(title, Column("job", wraps=True), *map(Column, headings))
    for job in outcome.report:
        table.add_row(*_cells(outcome, job))
    facts = Table.grid(padding=(0, 2))
    for what, text in (
        ("memory", _memory_text(outcome.report)),
        ("time", _time_text(outcome)),
        ("numbers", _numbers_text(outcome)),
        ("report", f"{outcome.out}: report.json, memory.png, trace.json (opens in Perfetto)"),
    ):
        facts.add_row(Text(what), Text(text, overflow="fold"))
    return Group(table, facts)


def _cells(outcome: Outcome, job: JobReport) -> tuple[str, ...]:
    return (
        job.name,
        str(job.steps),
        f"{job.losses[0]:.3f} to {job.losses[-1]:.3f}" if job.losses else "-",
        f"{outcome.accuracies[job.name]:.1%}" if job.ok else job.state,
        "-" if job.solo_peak_bytes is None else format_bytes(job.solo_peak_bytes),
        "equal" if outcome.is_equal(job.name) else "DIFFER",
    )


def _memory_text(report: Report) -> str:
    together = (
        f"together at most {format_bytes(report.peak_bytes)}, "
        f"budget {format_bytes(report.budget_bytes)}"
    )
    if report.side_by_side_bytes is None:
        return together
    share = report.peak_bytes / report.side_by_side_bytes
    return (
        f"{together}; side by side they would need {format_bytes(report.side_by_side_bytes)} "
        f"(used: {share:.0%} of that)"
    )


def _time_text(outcome: Outcome) -> str:
    others = [f"{format_seconds(e.seconds)} with {_threads(e.threads)}" for e in outcome.eager]
    together = outcome.setup_seconds + outcome.report.seconds
    return (
        f"together {format_seconds(together)}, start-up included; one after another, eager: "
        f"{', '.join(others)}: {outcome.speedup:.2f} times as fast as the faster of these"
    )


def _numbers_text(outcome: Outcome) -> str:
    threads = _threads(outcome.eager[0].threads)
    unequal = [job.name for job in outcome.report if not outcome.is_equal(job.name)]
    if unequal:
        return f"DIFFERENT from the eager loop with {threads}: {', '.join(unequal)}"
    count = sum(job.steps for job in outcome.report)
    return f"all {count} losses equal the eager loop's, bit for bit ({threads} per operator)"
