"""Traces of public clusters, read as jobs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from waterflow.cluster.spec import JobSpec
from waterflow.cluster.traces import formats
from waterflow.cluster.traces.rows import Reader, Row, in_order, shifted
from waterflow.common.errors import JobError


@dataclass(frozen=True)
class Format:
    """A format: the columns that tell it, and how a line becomes a job.

    `shift`: its times count from a date, so the first job is put at 0. A format without columns
    is separated by tabs and has no header; `fields` are its columns in order.
    """

    read: Reader
    columns: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    shift: bool = False


_GAVEL = ("type", "command", "argument", "needs_data", "steps", "arrival", "scale_factor")
_PHYSICAL = [
    "type",
    "command",
    "folder",
    "argument",
    "needs_data",
    "steps",
    "scale_factor",
    "priority",
    "objective",
    "arrival",
]
_SHOCKWAVE = [
    "type",
    "command",
    "folder",
    "argument",
    "needs_data",
    "steps",
    "scale_factor",
    "mode",
    "priority",
    "objective",
    "duration",
    "arrival",
]

#: In the order in which they are tried: the first whose columns are all there.
FORMATS: dict[str, Format] = {
    "waterflow": Format(formats.own, ("job", "submit", "gpus", "seconds")),
    "itp-models": Format(
        formats.itp_models,
        ("job_id", "submission_time", "duration", "num_gpu", "num_iteration", "model_name"),
        shift=True,
    ),
    "itp": Format(formats.itp, ("job_id", "submission_time", "duration", "num_gpu"), shift=True),
    "philly": Format(formats.philly, ("timestamp", "duration", "num_gpus", "cluster"), shift=True),
    "muri": Format(formats.muri, ("job_id", "iteration_time", "resource_time_0", "priority")),
    "elasticflow": Format(formats.elasticflow, ("job_id", "real_duration", "iteration", "num_gpu")),
    "chronus": Format(
        formats.chronus, ("job_id", "user", "num_gpu", "expect_time_list"), shift=True
    ),
    "tiresias": Format(
        formats.tiresias, ("job_id", "num_gpu", "submit_time", "iterations", "duration")
    ),
    "alibaba": Format(formats.alibaba, ("name", "cpu_milli", "num_gpu", "gpu_milli"), shift=True),
    "gavel": Format(formats.gavel, fields=_GAVEL),
    "gavel-physical": Format(formats.gavel, fields=tuple(_PHYSICAL)),
    "shockwave": Format(formats.shockwave, fields=tuple(_SHOCKWAVE)),
}


def read_trace(path: str | Path, format: str = "") -> tuple[JobSpec, ...]:
    """The jobs of a trace, by time of submission.

    Raises:
        JobError: the file cannot be read, its format is not known, or a line is wrong.
    """
    path = Path(path)
    if format and format not in FORMATS:
        near = get_close_matches(format, FORMATS, n=2) or list(FORMATS)
        raise JobError(f"there is no trace format {format!r}; near: {', '.join(near)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            name = format or recognise(path, first)
            file.seek(0)
            chosen = FORMATS[name]
            found = [(chosen.read(row), row) for row in _rows(path, file, chosen)]
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read the trace {path}: {error}; give a text file") from error
    jobs = in_order([(job, row) for job, row in found if job is not None])
    if not jobs:
        raise JobError(f"{path} has no jobs (format {name}): give a trace with at least one line")
    return shifted(jobs) if chosen.shift else jobs


def recognise(path: Path, first_line: str) -> str:
    """The name of the format that a file's first line tells."""
    columns = {cell.strip() for cell in first_line.split(",")}
    for name, known in FORMATS.items():
        if known.columns and columns.issuperset(known.columns):
            return name
    fields = first_line.rstrip("\n").split("\t")
    for name, known in FORMATS.items():
        if known.fields and len(fields) == len(known.fields):
            return name
    raise JobError(
        f"{path} is of no format that is known: its first line is {first_line.strip()[:80]!r}; "
        f"say --format (one of {', '.join(FORMATS)}), or write the columns job,submit,gpus,seconds"
    )


def _rows(path: Path, lines: Iterator[str], chosen: Format) -> Iterator[Row]:
    if chosen.fields:
        for number, line in enumerate(lines, 1):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) != len(chosen.fields):
                raise JobError(
                    f"{path}, line {number}: {len(cells)} fields instead of "
                    f"{len(chosen.fields)}: separate them by tabs, or remove the line"
                )
            yield Row(path, number, dict(zip(chosen.fields, cells, strict=True)))
        return
    reader = csv.DictReader(lines)
    for cells_by_name in reader:
        more = cells_by_name.get(None)  # type: ignore[call-overload]
        if more and any(more):
            raise JobError(
                f"{path}, line {reader.line_num}: {len(more)} fields more than the first line "
                f"names, from {more[0]!r} on: quote fields with commas, or remove the line"
            )
        cells_of = {k: v or "" for k, v in cells_by_name.items() if k is not None}
        yield Row(path, reader.line_num, cells_of)
