"""A report as people meet it: one row per job for a terminal or a notebook, and what to know of it.

Names and errors are whatever users and libraries made them: `common.text` has them shown.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Protocol

from waterflow.common.text import lines, one_line, printable
from waterflow.common.units import format_bytes, format_seconds
from waterflow.report.decisions import Decision
from waterflow.report.idle import IdleReason, idle_text
from waterflow.report.job_report import JobReport


class Summed(Protocol):
    """What is asked of a report; `Report` is one."""

    policy: str
    device: str
    lanes: int
    seconds: float
    peak_bytes: int
    budget_bytes: int
    interrupted: bool
    idle_seconds: dict[IdleReason, float]
    decisions: list[Decision]

    @property
    def side_by_side_bytes(self) -> int | None:
        """See `Report`."""

    def __iter__(self) -> Iterator[JobReport]: ...

    def __len__(self) -> int: ...


HEADINGS = ("job", "state", "steps", "last loss", "steps/s", "time", "peak", "alone")
#: Jobs that a notebook or a prompt shows: those at either end, where there are more.
_SHOWN = 20


def cells(job: JobReport) -> tuple[str, ...]:
    """A job as one row under `HEADINGS`."""
    return (
        printable(job.name),
        job.state,
        str(job.steps),
        f"{job.losses[-1]:.4g}" if job.losses else "-",
        f"{job.steps_per_second:.1f}",
        format_seconds(job.wall_seconds),
        format_bytes(job.peak_bytes),
        "-" if job.solo_peak_bytes is None else format_bytes(job.solo_peak_bytes),
    )


def title(report: Summed) -> str:
    """What ran, where."""
    return printable(
        f"waterflow: {report.policy or 'run'} on {report.device}, {report.lanes} lanes"
    )


def totals(report: Summed) -> str:
    """What the jobs held together, and for how long."""
    together = f"together {format_bytes(report.peak_bytes)}"
    if report.budget_bytes:
        together += f" of {format_bytes(report.budget_bytes)}"
    return f"{together}, {format_seconds(report.seconds)}"


def remarks(report: Summed) -> Iterator[str]:
    """What is to be known beside the rows, a line each, or several of a longer error: errors
    first."""
    for job in report:
        if job.error:
            yield _said(job.name, f"{job.error_type or 'error'}: {job.error}")
    if report.interrupted:
        yield "interrupted"
    if report.side_by_side_bytes is not None:
        yield f"side by side they need {format_bytes(report.side_by_side_bytes)}"
    idle = idle_text(report.idle_seconds, report.lanes * report.seconds)
    if idle:
        yield idle
    latest = {decision.job: decision for decision in report.decisions}
    for decision in latest.values():
        yield _said(decision.job or "all", decision.what)
    for job in report:
        if job.captured != "captured":
            yield _said(job.name, job.captured)
    for job in report:
        for note in job.notes:
            yield _said(job.name, note)
    for job in report:
        for spill in job.spills[-1:]:
            yield _said(job.name, spill.describe())
        if job.memory_speeds:
            yield _said(job.name, _speeds(job))
        if job.slowdown is not None:
            yield _said(job.name, job.slowdown.describe())


def _speeds(job: JobReport) -> str:
    """What it made of the limits that were tried, the latest of each."""
    tried = dict(job.memory_speeds)
    told = (f"{tried[limit]:.3g} under {format_bytes(limit)}" for limit in sorted(tried))
    return f"steps/s: {', '.join(told)}"


def _said(name: str, text: str) -> str:
    """Further lines are indented: none looks like another job's."""
    return f"{printable(name)}: {lines(text)}".replace("\n", "\n  ")


def plain(report: Summed) -> str:
    """The report as a few lines of text: what a prompt shows of it."""
    rows = [HEADINGS, *(row if row else _left_out(report) for row in _rows(report))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    texts = []
    for row in rows:
        first = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        texts.append("  ".join([*first, *numbers]).rstrip())
    return "\n".join([title(report), *texts, totals(report), *_errors(report)])


def as_html(report: Summed) -> str:
    """The same as a table for a notebook; everything that is not ours is escaped."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in HEADINGS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row or _left_out(report))}</tr>"
        for row in _rows(report)
    )
    below = "<br>".join(html.escape(line) for line in (totals(report), *_errors(report)))
    return (
        f"<div><b>{html.escape(title(report))}</b><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{below}</div>"
    )


def _rows(report: Summed) -> Sequence[tuple[str, ...] | None]:
    """The rows that are shown; None stands for those that are left out."""
    jobs = list(report)
    if len(jobs) <= _SHOWN:
        return [_clipped(job) for job in jobs]
    half = _SHOWN // 2
    return [*map(_clipped, jobs[:half]), None, *map(_clipped, jobs[-half:])]


def _clipped(job: JobReport) -> tuple[str, ...]:
    name, *others = cells(job)
    return (name if len(name) <= 40 else f"{name[:37]}...", *others)


def _left_out(report: Summed) -> tuple[str, ...]:
    return (f"... {len(report) - _SHOWN} more", *[""] * (len(HEADINGS) - 1))


def _errors(report: Summed) -> list[str]:
    failed = [job for job in report if not job.ok]
    shown = [
        one_line(f"{printable(job.name)}: {job.error_type or 'error'}: {job.error}", 160)
        for job in failed[:_SHOWN]
    ]
    more = [f"... {len(failed) - _SHOWN} more failed"] if len(failed) > _SHOWN else []
    return [*shown, *more]
