"""Tables of the report's page: what was decided, by kind, and what losses and metrics came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from waterflow.common.html import table, text
from waterflow.common.units import format_bytes
from waterflow.report.decisions import Decision, Kind

#: A `report.report.Report`, whose module imports the page's.
Report: TypeAlias = Any
#: A job's name as HTML.
Named: TypeAlias = Callable[[str], str]

_LISTED = 500  # rows of a table
# What spilled is told by the jobs' own `spills`, with numbers in columns.
_TITLES: dict[Kind, str] = {
    "waited": "Who waited, rested and went on",
    "throttled": "Who was throttled, and by how much",
    "other": "Limits, budget, priorities",
}


def decision_tables(report: Report, named: Named) -> str:
    """Who waited, who was throttled, what spilled, what limits were tried: a table of each."""
    waited, throttled, other = (
        _decided(title, [one for one in report.decisions if one.kind == kind], named)
        for kind, title in _TITLES.items()
    )
    return waited + throttled + _spilled(report, named) + _speeds(report, named) + other


def _decided(title: str, decisions: list[Decision], named: Named) -> str:
    rows = [
        [f"{one.seconds:.3f}", named(one.job) if one.job else "all", text(one.what)]
        for one in decisions
    ]
    return _listed(title, ["second", "job", "what"], rows, (1, 2))


def _spilled(report: Report, named: Named) -> str:
    rows = [
        [
            f"{spill.seconds:.3f}",
            named(job.name),
            "none" if spill.limit is None else format_bytes(spill.limit),
            format_bytes(spill.copied_bytes),
            format_bytes(spill.away_bytes),
            text(spill.tier),
        ]
        for job in report
        for spill in job.spills
    ]
    head = ["second", "job", "limit", "a step copies", "away between steps", "to"]
    return _listed("What spilled", head, rows, (1, 5))


def _speeds(report: Report, named: Named) -> str:
    rows = [
        [named(job.name), format_bytes(limit), f"{speed:.3g}"]
        for job in report
        for limit, speed in job.memory_speeds
    ]
    head = ["job", "under a limit of", "steps/s"]
    return _listed("Limits that were tried for memory that jobs share", head, rows, (0,))


def _listed(title: str, head: list[str], rows: list[list[str]], words: tuple[int, ...]) -> str:
    if not rows:
        return ""
    left = f'<p class="soft">The first {_LISTED} of {len(rows):,}; report.json has all.</p>'
    shown = table(title, head, rows[:_LISTED], words=words)
    return shown + (left if len(rows) > _LISTED else "")


def metrics_of_jobs(report: Report) -> dict[str, dict[str, Any]]:
    """By metric, then by job: numbers, one a step, or pairs of a step and a number.

    What `Job.evaluate` found is there as "evaluation: NAME", apart from a step's metric of that
    name.
    """
    found: dict[str, dict[str, Any]] = {}
    for job in report:
        for name, values in job.metrics.items():
            if len(values):
                found.setdefault(name, {})[job.name] = values
        for evaluation in job.evaluations:
            for name, value in evaluation.values.items():
                of = found.setdefault(f"evaluation: {name}", {})
                of.setdefault(job.name, []).append((evaluation.step, value))
    return found


def losses_table(losses: Mapping[str, Any], named: Named) -> str:
    """First, lowest, highest and last loss of each job."""
    rows = [[named(name), str(len(values)), *_range_of(values)] for name, values in losses.items()]
    head = ["job", "losses", "first", "lowest", "highest", "last"]
    return table("Losses of each job", head, rows) if rows else ""


def metrics_table(metrics: Mapping[str, Mapping[str, Any]], named: Named) -> str:
    """The same of each metric and evaluation; numbers that a step has not told do not count."""
    rows = []
    for name, jobs in metrics.items():
        for job, values in jobs.items():
            numbers = np.asarray(values, dtype=np.float64)
            numbers = numbers[:, 1] if numbers.ndim == 2 else numbers
            told = numbers[~np.isnan(numbers)]
            shown = _range_of(told) if len(told) else ["-"] * 4
            rows.append([named(job), f"<bdi>{text(name)}</bdi>", str(len(told)), *shown])
    head = ["job", "metric", "numbers", "first", "lowest", "highest", "last"]
    return _listed("Metrics and evaluations of each job", head, rows, (0, 1))


def _range_of(losses: Any) -> list[str]:
    values = np.asarray(losses, dtype=np.float64)
    finite = values[np.isfinite(values)]
    ends = [f"{finite.min():.4g}", f"{finite.max():.4g}"] if len(finite) else ["-", "-"]
    return [f"{values[0]:.4g}", *ends, f"{values[-1]:.4g}"]
