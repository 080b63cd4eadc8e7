"""The same jobs under each policy, and as a plain eager loop, side by side.

The eager loop is what users have today, so it is the reference for time and for the losses: a
policy that changes one bit of one loss is wrong, however fast it is. Kernels round differently when
they are split among another number of threads, so the losses are compared with a loop that has a
lane's threads; where torch would use more, that loop runs too, and the faster one is the reference
for time.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from waterflow.common.units import format_bytes, format_seconds, parse_bytes
from waterflow.partitioner.policies import COMPARED
from waterflow.report.report import JobReport, Report
from waterflow.report.table import Column, FittedTable

if TYPE_CHECKING:
    from waterflow.job.job import Job

EAGER = "eager"
_LANES = 2
_CAPTION = (
    "eager: the plain loop, one job after another. Time is training alone, setup is capture and "
    "planning; speed is against the faster eager run."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to run the jobs.

    `seconds` is the training alone, `setup_seconds` what capture and planning added,
    `steps_per_second` counts all jobs' steps, `speed` is relative to the faster eager run (None if
    either took no time), `peak_bytes` what all jobs held at most (None where it was not measured),
    `equal` whether every loss equals eager's bit for bit (None for the eager run with other
    threads), `failed` the names of jobs that ended with an error.
    """

    name: str
    seconds: float
    setup_seconds: float
    steps_per_second: float
    speed: float | None
    peak_bytes: int | None
    equal: bool | None
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows, eager first, and the budget in bytes that the policies had."""

    memory_bytes: int
    rows: list[Row]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether no job failed and all losses are equal."""
        return all(row.equal is not False and not row.failed for row in self.rows)

    def to_json(self) -> str:
        """Return {"memory_bytes": ..., "rows": [...]} as one JSON document."""
        return json.dumps(asdict(self), allow_nan=False)

    def table(self) -> FittedTable:
        """Return the rows for a terminal."""
        headings = ("time", "setup", "steps/s", "speed", "peak", "losses")
        columns = Column("run", wraps=True), *map(Column, headings)
        table = FittedTable(f"budget {format_bytes(self.memory_bytes)}", *columns)
        for row in self.rows:
            table.add_row(*_cells(row))
        return table.add_below([_CAPTION])


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One way to run the jobs, before there is something to compare it with."""

    name: str
    report: Report
    setup_seconds: float = 0.0
    other_threads: bool = False


def compare(
    make_jobs: Callable[[], Sequence[Job]],
    memory: str | SupportsIndex,
    policies: Sequence[str] = COMPARED,
    device: str = "cpu",
) -> Comparison:
    """Run the jobs of `make_jobs` eagerly, then under each policy with `memory` as the budget.

    Every run calls `make_jobs` anew and expects the same jobs in the same initial state. Ctrl-C
    ends the comparison and returns the rows that are complete. Raises what `waterflow.run` raises.
    """
    memory_bytes = parse_bytes(memory)
    runs: list[_Run] = []
    try:
        for run in _all_runs(make_jobs, memory_bytes, policies, device):
            runs.append(run)
    except KeyboardInterrupt:
        return Comparison(memory_bytes=memory_bytes, rows=_rows(runs), interrupted=True)
    return Comparison(memory_bytes=memory_bytes, rows=_rows(runs))


def equal_losses(one: JobReport, other: JobReport) -> bool:
    """Whether two jobs had the same losses, bit for bit: NaN equals itself, 0.0 is not -0.0."""
    return _bits(one.losses) == _bits(other.losses)


def _bits(losses: Sequence[float]) -> bytes:
    return struct.pack(f"{len(losses)}d", *losses)


def _all_runs(
    make_jobs: Callable[[], Sequence[Job]], memory: int, policies: Sequence[str], device: str
) -> Iterator[_Run]:
    full = torch.get_num_threads()
    threads = max(1, full // _LANES)
    yield _run_eager(make_jobs(), threads)
    if threads != full:
        yield _run_eager(make_jobs(), full, other_threads=True)
    for policy in policies:
        yield _run_policy(make_jobs(), memory, policy, device, threads)


def _run_eager(jobs: Iterable[Job], threads: int, *, other_threads: bool = False) -> _Run:
    began = time.perf_counter()
    done = [_run_eager_job(job, threads) for job in jobs]
    peaks = [job.peak_bytes for job in done]
    report = Report(
        jobs={job.name: job for job in done},
        # One after another, so the largest counts; unknown if one of them was not measured.
        peak_bytes=max(peaks, default=0) if all(peaks) else 0,
        seconds=time.perf_counter() - began,
    )
    plural = "" if threads == 1 else "s"
    name = f"{EAGER}, {threads} thread{plural}"
    return _Run(name=name, report=report, other_threads=other_threads)


def _run_eager_job(job: Job, threads: int) -> JobReport:
    from waterflow.job.training_step import run_eager

    try:
        return run_eager(job, threads=threads)
    except Exception as error:  # the job's own; the others are still worth comparing
        kind = type(error).__name__
        return JobReport(name=job.name, state="failed", error=str(error), error_type=kind)


def _run_policy(jobs: Sequence[Job], memory: int, policy: str, device: str, threads: int) -> _Run:
    import waterflow as wf

    began = time.perf_counter()
    report = wf.run(
        jobs, memory, device=device, policy=policy, lanes=_LANES, threads=threads, progress=False
    )
    setup = max(0.0, time.perf_counter() - began - report.seconds)
    return _Run(name=policy, report=report, setup_seconds=setup)


def _rows(runs: Sequence[_Run]) -> list[Row]:
    if not runs:
        return []
    eager = [run for run in runs if run.name.startswith(EAGER)]
    fastest = max(_rate(run.report) for run in eager)
    return [_row(run, runs[0].report, fastest) for run in runs]


def _row(run: _Run, eager: Report, fastest: float) -> Row:
    report, rate = run.report, _rate(run.report)
    equal = all(equal_losses(job, eager[job.name]) for job in report)
    return Row(
        name=run.name,
        seconds=report.seconds,
        setup_seconds=run.setup_seconds,
        steps_per_second=rate,
        speed=rate / fastest if rate and fastest else None,
        peak_bytes=report.peak_bytes or None,
        equal=None if run.other_threads else equal,
        failed=[job.name for job in report if not job.ok],
    )


def _rate(report: Report) -> float:
    return sum(job.steps for job in report) / report.seconds if report.seconds > 0 else 0.0


def _cells(row: Row) -> Iterable[Any]:
    losses = {True: "equal", False: "DIFFER", None: "other threads"}[row.equal]
    return (
        row.name,
        format_seconds(row.seconds),
        format_seconds(row.setup_seconds),
        f"{row.steps_per_second:.1f}",
        "-" if row.speed is None else f"{row.speed:.2f}x",
        "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        f"failed: {', '.join(row.failed)}" if row.failed else losses,
    )
