"""A folder with what was found: a page, its pictures, and a table of jobs for each policy."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path

from waterflow.cluster.report import pictures
from waterflow.cluster.report.classes import average_by_size
from waterflow.cluster.simulator.results import Results
from waterflow.common.errors import ReportError
from waterflow.common.files import write_atomically
from waterflow.common.html import page, table, text

_COLUMNS = [
    "job",
    "submit",
    "gpus",
    "start",
    "finish",
    "service",
    "preemptions",
    "migrations",
    "resizes",
    "opportunistic",
]


def make_folder(out: Path) -> None:
    """Make a report's folder; raises ReportError where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error}; name a folder (--out report/)"
        ) from error


def write_report(out: Path, trace: str, gpus: int, results: Mapping[str, Results]) -> None:
    """Write index.html, pictures, results.json and POLICY.csv to a folder, made if need be."""
    drawn = {
        "completion_times.png": pictures.completion_times(results),
        "gpus_in_use.png": pictures.gpus_in_use(results, gpus),
        "queue_length.png": pictures.queue_length(results),
    }
    make_folder(out)
    try:
        for name, content in drawn.items():
            write_atomically(out / name, content)
        for name, found in results.items():
            write_atomically(out / f"{name}.csv", _jobs(found).encode())
        summary = {name: found.summary() for name, found in results.items()}
        document = json.dumps({"trace": trace, "gpus": gpus, "policies": summary}, indent=1)
        write_atomically(out / "results.json", document.encode())
        write_atomically(out / "index.html", _page(trace, gpus, results, list(drawn)).encode())
    except OSError as error:
        raise ReportError(f"cannot write the report to {out}: {error}") from error


def _jobs(found: Results) -> str:
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(_COLUMNS)
    arrays = (found.name, *(getattr(found, name) for name in _COLUMNS[1:]))
    rows.writerows(zip(*(array.tolist() for array in arrays), strict=True))
    return lines.getvalue()


def _page(trace: str, gpus: int, results: Mapping[str, Results], images: list[str]) -> str:
    title = f"{trace} on {gpus} GPUs"
    summaries = {name: found.summary() for name, found in results.items()}
    columns = list(next(iter(summaries.values()))) if summaries else []
    rows = [[text(name), *(f"{row[c]:,.6g}" for c in columns)] for name, row in summaries.items()]
    sizes = {name: average_by_size(found) for name, found in results.items()}
    kinds = list(next(iter(sizes.values()))) if sizes else []
    classes = [
        [text(name), *(f"{row[kind][1]:,.1f} ({row[kind][0]:,})" for kind in kinds)]
        for name, row in sizes.items()
    ]
    unfinished = [name for name, found in results.items() if not found.finished]
    note = ""
    if unfinished:
        note = f'<p class="bad">Not all jobs are done: {text(", ".join(unfinished))}.</p>'
    shown = "".join(f'<p><img src="{image}" alt="{image}"></p>' for image in images)
    return page(
        title,
        f"<h1>{text(title)}</h1>{note}"
        + table("What each policy came to", ["policy", *columns], rows)
        + "<p>Small jobs have less than 10,000 GPU seconds, large ones more than 200,000.</p>"
        + table("Average JCT in s (jobs)", ["policy", *kinds], classes)
        + shown,
    )
