"""What a run did: one JobReport per job, the memory of all of them over time, and how to keep it.

A saved report is a directory of files. `report.json` is the whole report; `memory.png`,
`trace.json` and, where bokeh is installed, `report.html` are made from it and can be made again.
Everything is written beside its place and moved there, so that a full disk or
a kill leaves the previous file, never half of one.
"""

from __future__ import annotations

import difflib
import json
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from waterflow.common.errors import ReportError, ReportWarning
from waterflow.common.files import write_atomically
from waterflow.common.imports import random_kept
from waterflow.common.warn import place_of_call, warn_at
from waterflow.report import summary
from waterflow.report.decisions import Decision, decisions_from, decisions_to_json
from waterflow.report.idle import IdleReason, idle_from, idle_text
from waterflow.report.job_report import JobReport, State
from waterflow.report.json_fields import Fields, encode_float
from waterflow.report.timeline import Span, Spans, Timeline

if TYPE_CHECKING:
    from waterflow.report.table import FittedTable

__all__ = ["Decision", "JobReport", "Report", "Span", "Spans", "State", "Timeline"]

_FORMAT = "waterflow report"
_VERSION = 1


@dataclass(kw_only=True, repr=False)
class Report:
    """What a run did: sizes in bytes, times in seconds.

    `peak_bytes` is the most that all jobs held at once, `extent_bytes` the arena's highest address
    that was ever used (fragmentation is what lies between the two), `budget_bytes` what was
    allowed. `workspace_bytes` is what libraries hold on a GPU beside the budget, `pinned_bytes` the
    most page-locked host memory that was taken for it (batches, what is spilled, tensors of jobs
    that rest), `syncs` how often the lanes waited for each other, `deviations` how many requests
    for memory differed from the profile that they were planned by. `idle_seconds` is the time of
    lanes that ran no step while jobs flowed, by the reason: they waited for "data", for "memory"
    that another lane held, for "python" between steps, or there were fewer "jobs" than lanes.
    `decisions` tells who rested and came back, who was held back for a guaranteed job and by how
    much, and what became of the budget; of very many the first and the last. `report["name"]` is a
    job; iterating yields the jobs in the order given to the run.
    """

    jobs: dict[str, JobReport] = field(default_factory=dict)
    peak_bytes: int = 0
    extent_bytes: int = 0
    budget_bytes: int = 0
    policy: str = ""
    device: str = "cpu"
    lanes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    spans: Spans = field(default_factory=Spans)
    versions: dict[str, str] = field(default_factory=dict)
    schedules: list[str] = field(default_factory=list)
    syncs: int = 0
    deviations: int = 0
    workspace_bytes: int = 0
    pinned_bytes: int = 0
    idle_seconds: dict[IdleReason, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def __getitem__(self, name: str) -> JobReport:
        """Return a job's report; raises KeyError that lists the names nearest to a wrong one."""
        if name in self.jobs:
            return self.jobs[name]
        near = difflib.get_close_matches(str(name), self.jobs, n=3, cutoff=0.4) or list(self.jobs)
        listed = ", ".join(repr(known) for known in near[:8])
        raise KeyError(f"no job {name!r} in this report; nearest: {listed or 'it has no jobs'}")

    def __iter__(self) -> Iterator[JobReport]:
        return iter(self.jobs.values())

    def __len__(self) -> int:
        return len(self.jobs)

    def __contains__(self, name: object) -> bool:
        return name in self.jobs

    @property
    def ok(self) -> bool:
        """Whether no job ended with an error."""
        return all(job.ok for job in self)

    @property
    def side_by_side_bytes(self) -> int | None:
        """The sum of the jobs' solo peaks, which separate processes would need; None if unknown."""
        peaks = [job.solo_peak_bytes for job in self]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if known and len(known) == len(peaks) else None

    def to_json(self) -> str:
        """Return the whole report as one strictly valid JSON document."""
        document = {
            "format": _FORMAT,
            "format_version": _VERSION,
            "policy": self.policy,
            "device": self.device,
            "lanes": self.lanes,
            "seconds": encode_float(self.seconds),
            "interrupted": self.interrupted,
            "peak_bytes": self.peak_bytes,
            "extent_bytes": self.extent_bytes,
            "budget_bytes": self.budget_bytes,
            "side_by_side_bytes": self.side_by_side_bytes,
            "workspace_bytes": self.workspace_bytes,
            "pinned_bytes": self.pinned_bytes,
            "idle_seconds": {why: encode_float(took) for why, took in self.idle_seconds.items()},
            "decisions": decisions_to_json(self.decisions),
            "syncs": self.syncs,
            "deviations": self.deviations,
            "versions": dict(self.versions),
            "schedules": list(self.schedules),
            "jobs": [job.to_dict() for job in self],
            "timeline": _columns_to_dict(self.timeline, _TIMELINE),
            "spans": _columns_to_dict(self.spans, _SPANS),
        }
        # Counts may be numpy integers, which json does not know and operator.index turns into int.
        return json.dumps(document, allow_nan=False, default=operator.index)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote; raises ReportError that says what is wrong."""
        try:
            fields = Fields(json.loads(text), "")
        except (ValueError, RecursionError) as error:
            if isinstance(error, ReportError):
                raise
            raise ReportError(f"not JSON, or cut off: {error}") from None
        _check_format(fields)
        jobs = [
            JobReport.from_fields(Fields(job, f"jobs[{index}]."))
            for index, job in enumerate(fields.items("jobs"))
        ]
        named = {job.name: job for job in jobs}
        if len(named) < len(jobs):
            raise ReportError("two jobs have the same name")
        return cls(
            jobs=named,
            peak_bytes=fields.integer("peak_bytes"),
            extent_bytes=fields.integer("extent_bytes"),
            budget_bytes=fields.integer("budget_bytes"),
            policy=fields.text("policy"),
            device=fields.text("device"),
            lanes=fields.integer("lanes"),
            seconds=fields.number("seconds"),
            interrupted=fields.flag("interrupted"),
            timeline=Timeline(**_columns_from(fields.inner("timeline"), _TIMELINE)),
            spans=Spans(**_columns_from(fields.inner("spans"), _SPANS)),
            versions=fields.text_map("versions"),
            schedules=fields.texts("schedules"),
            syncs=fields.integer("syncs"),
            deviations=fields.integer("deviations"),
            workspace_bytes=fields.integer("workspace_bytes"),
            pinned_bytes=fields.integer("pinned_bytes"),
            idle_seconds=idle_from(fields),
            decisions=decisions_from(fields),
        )

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool | None = None) -> Path:
        """Write the report into `directory`, made if needed; return it.

        The files are report.json, trace.json, memory.png and report.html; the last needs bokeh
        (`pip install 'waterflow[page]'`), a `ReportWarning` says if it is missing.

        Args:
            directory: the folder.
            overwrite: whether a report that is there already is replaced: with None it is, and a
                ReportWarning says so; False refuses.

        Raises:
            ReportError: it cannot be written, or is not to be replaced; names the path.
        """
        path = Path(directory)
        if overwrite is not True and (path / "report.json").exists():
            if overwrite is False:
                raise ReportError(f"{path} already holds a report: save to another folder")
            text = f"the report that was in {path} is replaced (overwrite=True says nothing)"
            warn_at(place_of_call(), text, ReportWarning)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # The report itself comes first: it is the one file that cannot be made again.
            write_atomically(path / "report.json", self.to_json().encode())
            write_atomically(path / "trace.json", self._trace().encode())
            write_atomically(path / "memory.png", self.picture())
            self._save_page(path / "report.html")
        except OSError as error:
            raise ReportError(f"cannot write a report to {path}: {error}") from error
        return path

    def _save_page(self, path: Path) -> None:
        try:
            content = self.page()
        except ReportError as error:
            path.unlink(missing_ok=True)  # one of another run would be taken for this one's
            warn_at(place_of_call(), f"no report.html: {error}", ReportWarning)
        else:
            write_atomically(path, content.encode())

    def page(self) -> str:
        """Return the report as an HTML page, one file that needs no network.

        Raises ReportError if bokeh is not installed.
        """
        try:
            import bokeh  # noqa: F401
        except ImportError:
            raise ReportError(
                "bokeh, which draws it, is not installed: pip install 'waterflow[page]'"
            ) from None
        from waterflow.report.page import report_page  # bokeh takes half a second to import

        return report_page(self)

    def _trace(self) -> str:
        from waterflow.report.perfetto import trace_json

        return trace_json(self.spans, self.timeline, self.decisions)

    def picture(self, picture_format: str = "png") -> bytes:
        """Return memory over time as the bytes of a "png", "svg" or "pdf" file."""
        from waterflow.report.memory_plot import memory_png  # matplotlib takes a second to import

        return memory_png(
            self.timeline,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            picture_format=picture_format,
            spans=self.spans if self._has_all_spans() else None,
            idle=idle_text(self.idle_seconds, self.lanes * self.seconds),
        )

    def _has_all_spans(self) -> bool:
        """Of a long run the first and the last are kept: the time between is not idle."""
        recorded = len(set(zip(self.spans.job.tolist(), self.spans.step.tolist(), strict=True)))
        return recorded >= sum(job.steps - job.resumed_steps for job in self)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote, given the directory or its report.json.

        Raises ReportError, which names the file, if it is missing, no report, or corrupt.
        """
        path = Path(directory)
        path = path / "report.json" if path.is_dir() else path
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ReportError(f"no report at {path}: expected what Report.save wrote") from None
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error}") from error
        except UnicodeDecodeError as error:
            raise ReportError(f"{path} is not a waterflow report: {error}") from error
        except ReportError as error:
            raise ReportError(f"{path} is not a readable waterflow report: {error}") from None

    def table(self) -> FittedTable:
        """Return one row per job for a terminal, and what they held together below."""
        with random_kept():
            from waterflow.report.table import Column, FittedTable

        name, state, *numbers = summary.HEADINGS
        columns = Column(name, wraps=True), Column(state, words=True), *map(Column, numbers)
        shown = FittedTable(summary.title(self), *columns)
        for job in self:
            shown.add_row(*summary.cells(job))
        return shown.add_below([summary.totals(self), *summary.remarks(self)])

    def __repr__(self) -> str:
        """A small table: what became of each job."""
        return summary.plain(self)

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return summary.as_html(self)

    def raise_errors(self) -> None:
        """Raises what the jobs ended with that have failed; returns where none has.

        The error itself, with its own traceback, where one job has failed; all of them in a group
        where several have, so that ``except*`` catches either. Each has a note with the name of
        its job. Of a report that was read from a file there is no more than the text.

        Raises:
            JobFailedError: a job of a report that was read from a file had failed.
            BaseExceptionGroup: several jobs have; an ExceptionGroup of errors.
            Whatever the one job that has failed raised.
        """
        errors = [error for error in (job.error_to_raise() for job in self) if error is not None]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} of {len(self)} jobs failed", errors)


_TIMELINE = ("seconds", "job", "bytes")
_SPANS = ("lane", "job", "step", "group", "start", "stop")


def _columns_to_dict(record: Timeline | Spans, columns: tuple[str, ...]) -> dict[str, Any]:
    lists: dict[str, Any] = {column: getattr(record, column).tolist() for column in columns}
    return {"names": record.names, **lists}


def _columns_from(fields: Fields, columns: tuple[str, ...]) -> dict[str, Any]:
    lists: dict[str, Any] = {"names": fields.texts("names")}
    for column in columns:
        try:
            lists[column] = np.asarray(fields.items(column))
        except (ValueError, OverflowError) as error:
            if isinstance(error, ReportError):
                raise
            raise ReportError(f"{column}: expected a list of numbers") from None
    return lists


def _check_format(fields: Fields) -> None:
    if fields.text("format") != _FORMAT:
        raise ReportError(f"its format is {fields.text('format')!r}, expected {_FORMAT!r}")
    if fields.integer("format_version") != _VERSION:
        raise ReportError(
            f"its format version is {fields.integer('format_version')}, this waterflow reads "
            f"{_VERSION}: read it with the waterflow that wrote it"
        )
