"""Reading cells, with errors that say the file, the line, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from waterflow.cluster.spec import JobSpec
from waterflow.common.errors import JobError


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a trace, by the names of its columns."""

    path: Path
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        found = (self.cells.get(column) or "").strip()
        if not found:
            raise self.error(column, "is missing", "fill it in, or remove the line")
        return found

    def number(self, column: str) -> float:
        """A number that is not negative."""
        text = self.text(column)
        try:
            found = float(text)
        except ValueError:
            raise self.error(column, f"is {text!r}", "write a number") from None
        if not math.isfinite(found) or found < 0:
            raise self.error(column, f"is {text}", "it has to be 0 or more; remove the line")
        return found

    def gpus(self, column: str) -> int:
        """A whole number of GPUs, at least one."""
        found = self.number(column)
        if found < 1 or found != int(found):
            raise self.error(column, f"is {found:g}", "a job has one GPU or more; remove the line")
        return int(found)

    def error(self, column: str, what: str, remedy: str) -> JobError:
        """An error in this line."""
        return JobError(f"{self.path}, line {self.line}: {column} {what}: {remedy}")


Reader = Callable[[Row], JobSpec | None]


def in_order(jobs: Sequence[tuple[JobSpec, Row]]) -> tuple[JobSpec, ...]:
    """Jobs by time of submission, the first at 0 or where it says; names must not repeat."""
    seen: dict[str, int] = {}
    for job, row in jobs:
        if job.name in seen:
            raise JobError(
                f"{row.path}, line {row.line}: job {job.name!r} is in line {seen[job.name]}, too: "
                "give each job a name of its own"
            )
        seen[job.name] = row.line
    lines = (replace(job, line=row.line) for job, row in jobs)
    found = sorted(lines, key=lambda job: job.submit)
    return tuple(replace(job, index=index) for index, job in enumerate(found))


def shifted(jobs: Sequence[JobSpec]) -> tuple[JobSpec, ...]:
    """The same, with the first submission at 0."""
    first = jobs[0].submit if jobs else 0.0
    return tuple(replace(job, submit=job.submit - first) for job in jobs)
