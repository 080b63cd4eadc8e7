"""The same jobs under each policy, and as a plain eager loop, side by side.

The eager loop is what users have today, so it is the reference for time and for the losses: a
policy that changes one bit of one loss is wrong, however fast it is.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from waterflow.partitioner.policies import POLICIES

from waterflow.report import JobReport, Report
from waterflow.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from waterflow import Job

EAGER = "eager, one after another"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to run the jobs.

    `seconds` is the training alone, `setup_seconds` what capture and planning added,
    `steps_per_second` counts all jobs' steps, `speed` is relative to eager (None if either took no
    time), `peak_bytes` what all jobs held at most (None where it was not measured), `equal` whether
    every loss equals eager's bit for bit, `failed` the names of jobs that ended with an error.
    """

    name: str
    seconds: float
    setup_seconds: float
    steps_per_second: float
    speed: float | None
    peak_bytes: int | None
    equal: bool
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
        return all(row.equal and not row.failed for row in self.rows)

    def to_json(self) -> str:
        """Return {"memory_bytes": ..., "rows": [...]} as one JSON document."""
        return json.dumps(asdict(self), allow_nan=False)

    def table(self) -> Table:
        """Return the rows for a terminal."""
        table = Table(title=f"budget {format_bytes(self.memory_bytes)}", box=SIMPLE_HEAD)
        table.add_column("run", overflow="fold")
        for heading in ("time", "setup", "steps/s", "speed", "peak", "losses"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        return table


def compare(
    make_jobs: Callable[[], Sequence[Job]],
    memory: str | SupportsIndex,
    policies: Sequence[str] = tuple(POLICIES),
    device: str = "cpu",
) -> Comparison:
    """Run the jobs of `make_jobs` eagerly, then under each policy with `memory` as the budget.

    Every run calls `make_jobs` anew and expects the same jobs in the same initial state. Ctrl-C
    ends the comparison and returns the rows that are complete. Raises what `waterflow.run` raises.
    """
    import waterflow as wf

    memory_bytes = parse_bytes(memory)
    rows: list[Row] = []
    try:
        eager = _run_eager(make_jobs())
        rows.append(_row(EAGER, eager, eager, setup_seconds=0.0))
        for policy in policies:
            jobs = make_jobs()
            began = time.perf_counter()
            report = wf.run(jobs, memory=memory_bytes, device=device, policy=policy, progress=False)
            if report.interrupted:
                raise KeyboardInterrupt
            setup = max(0.0, time.perf_counter() - began - report.seconds)
            rows.append(_row(policy, report, eager, setup_seconds=setup))
    except KeyboardInterrupt:
        return Comparison(memory_bytes=memory_bytes, rows=rows, interrupted=True)
    return Comparison(memory_bytes=memory_bytes, rows=rows)


def _run_eager(jobs: Iterable[Job]) -> Report:
    from waterflow.eager import run_eager

    began = time.perf_counter()
    done: list[JobReport] = [run_eager(job) for job in jobs]
    peaks = [job.peak_bytes for job in done]
    return Report(
        jobs={job.name: job for job in done},
        # One after another, so the largest counts; unknown if one of them was not measured.
        peak_bytes=max(peaks, default=0) if all(peaks) else 0,
        seconds=time.perf_counter() - began,
    )


def _row(name: str, report: Report, eager: Report, *, setup_seconds: float) -> Row:
    speed = _rate(report) / _rate(eager) if _rate(report) and _rate(eager) else None
    return Row(
        name=name,
        seconds=report.seconds,
        setup_seconds=setup_seconds,
        steps_per_second=_rate(report),
        speed=speed,
        peak_bytes=report.peak_bytes or None,
        equal=_loss_bits(report) == _loss_bits(eager),
        failed=[job.name for job in report if not job.ok],
    )


def _rate(report: Report) -> float:
    return sum(job.steps for job in report) / report.seconds if report.seconds > 0 else 0.0


def _loss_bits(report: Report) -> dict[str, bytes]:
    """The losses as bytes, because NaN is unequal to itself and 0.0 is equal to -0.0."""
    return {job.name: struct.pack(f"{len(job.losses)}d", *job.losses) for job in report}


def _cells(row: Row) -> Iterable[Any]:
    losses = "equal" if row.equal else "DIFFER"
    return (
        row.name,
        format_seconds(row.seconds),
        format_seconds(row.setup_seconds),
        f"{row.steps_per_second:.1f}",
        "-" if row.speed is None else f"{row.speed:.2f}x",
        "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        f"failed: {', '.join(row.failed)}" if row.failed else losses,
    )
