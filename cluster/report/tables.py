"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from waterflow.cluster.simulator.results import Results
from waterflow.report.table import Column, FittedTable


def side_by_side(trace: str, gpus: int, results: Mapping[str, Results]) -> FittedTable:
    """One line a policy."""
    headings = ("average JCT s", "99 % JCT s", "makespan s", "preempted", "moved", "jobs")
    table = FittedTable(f"{trace} on {gpus} GPUs", Column("policy"), *map(Column, headings))
    for name, found in results.items():
        row = found.summary()
        table.add_row(
            name,
            _seconds(row["average_jct"]),
            _seconds(row["p99_jct"]),
            _seconds(row["makespan"]),
            f"{row['preemptions']:,}",
            f"{row['migrations']:,}",
            f"{row['jobs']:,}" + ("" if found.finished else f" of {len(found.jobs):,}"),
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:,.1f}"
