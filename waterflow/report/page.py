"""The report as a page: one file that needs no network.

All numbers are in tables, too; the charts add what can be seen. What users have named stays text:
in HTML it is escaped, scripts get it as JSON, and the page's security policy runs no script but the
two that it came with, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from waterflow.common.html import page, shorten, table, text, visible
from waterflow.common.units import format_bytes, format_seconds
from waterflow.report.idle import idle_text
from waterflow.report.page_parts import (
    decision_tables,
    losses_table,
    metrics_of_jobs,
    metrics_table,
)
from waterflow.report.page_script import SCRIPT, STYLE
from waterflow.report.thinning import at_most, stretches, thin_bands

if TYPE_CHECKING:
    from waterflow.report.charts import Charts
    from waterflow.report.job_report import JobReport

#: A `report.report.Report`, whose module imports this one.
Report: TypeAlias = Any

_MOMENTS = 24  # rows of the table of memory over time
_METRICS = 12  # charts of metrics; a page of more helps nobody


def report_page(report: Report) -> str:
    """The page of a report.

    Raises:
        ImportError: bokeh is not installed.
    """
    from waterflow.report.charts import Charts, script

    page_of = _Page(report, lambda numbers: Charts(report, numbers))
    body = page_of.body()
    library = script()
    hashes = " ".join(f"'sha256-{_digest(code)}'" for code in (library, SCRIPT))
    policy = (
        f"default-src 'none';script-src {hashes};style-src 'unsafe-inline';"
        "img-src data: blob:;font-src data:;base-uri 'none';form-action 'none'"
    )
    end = (
        f'<script type="application/json" id="charts">{page_of.charts.json()}</script>'
        f"<script>{library}</script><script>{SCRIPT}</script>"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page(_title(report), body, STYLE, head, end)


def _digest(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def _title(report: Report) -> str:
    jobs = "1 job" if len(report) == 1 else f"{len(report)} jobs"
    return f"waterflow: {jobs} on {report.device}"


class _Page:
    def __init__(self, report: Report, charts: Callable[[Mapping[str, int]], Charts]) -> None:
        self.report = report
        every = dict.fromkeys([*report.jobs, *report.timeline.names, *report.spans.names])
        self.numbers = {name: number for number, name in enumerate(every)}
        self.charts = charts(self.numbers)

    def body(self) -> str:
        parts = {
            "memory": ("Memory over time", self._memory()),
            "lanes": ("Lanes", self._lanes()),
            "losses": ("Losses and metrics", self._losses()),
            "alone": ("What each job would need alone", self._alone()),
            "decisions": ("Decisions", self._decisions()),
            "jobs": ("Jobs", self._jobs()),
        }
        links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in parts.items())
        sections = "".join(
            f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{inner}</section>'
            for key, (title, inner) in parts.items()
        )
        return (
            f"<header><h1>{text(_title(self.report))}</h1>{self._outcome()}"
            f'<nav aria-label="Sections">{links}</nav></header>'
            f"<main>{self._figures()}{self._failures()}{sections}</main>{self._footer()}"
        )

    def _outcome(self) -> str:
        states: dict[str, int] = {}
        for job in self.report:
            states[job.state] = states.get(job.state, 0) + 1
        told = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items())
        mark = "" if self.report.ok else ' class="bad"'
        ending = " The run was interrupted." if self.report.interrupted else ""
        return f"<p{mark}>{text(told or 'no jobs')}.{ending}</p>"

    def _figures(self) -> str:
        report = self.report
        alone = report.side_by_side_bytes
        figures = {
            "most memory together": format_bytes(report.peak_bytes),
            "budget": format_bytes(report.budget_bytes) if report.budget_bytes else "none",
            "side by side they need": "unknown" if alone is None else format_bytes(alone),
            "time": format_seconds(report.seconds),
            "steps": f"{sum(job.steps for job in report):,}",
            "policy, lanes": f"{report.policy or 'none'}, {report.lanes}",
        }
        cells = "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>"
            for name, value in figures.items()
        )
        return f'<dl class="figures">{cells}</dl>'

    def _failures(self) -> str:
        failed = [job for job in self.report if job.error or not job.ok]
        if not failed:
            return ""
        parts = [
            f"<h3>{_name(job.name)}</h3><p>{text(job.error_type or job.state)}</p>"
            f'<pre tabindex="0">{text((job.error or "no text")[:20_000], lines=True)}</pre>'
            for job in failed
        ]
        return (
            f'<section aria-labelledby="failed"><h2 id="failed">What failed</h2>{"".join(parts)}'
            "</section>"
        )

    def _memory(self) -> str:
        report = self.report
        if not len(report.timeline):
            return "<p>No memory was sampled.</p>"
        self.charts.memory()
        seconds, sampled = report.timeline.bands()
        bands, _ = at_most(sampled, report.peak_bytes)
        at = float(seconds[int(bands.sum(axis=0).argmax())])
        held = f"Together the jobs held at most {format_bytes(report.peak_bytes)}"
        if report.budget_bytes:
            share = report.peak_bytes / report.budget_bytes
            held += f", {share:.1%} of the budget of {format_bytes(report.budget_bytes)}"
        budget = ""
        if report.budget_bytes and report.peak_bytes < 0.25 * report.budget_bytes:
            budget = '<button type="button" id="tall" aria-pressed="false">show the budget</button>'
        few = thin_bands(seconds, bands, _MOMENTS)
        return (
            f"<p>{held}, at {at:.3f} s.</p>{self._highlight()}{_controls(budget)}"
            + self._chart("memory", "Memory over time, a band for each job; the table has numbers")
            + self._notes("memory")
            + f"<details><summary>As a table</summary>{self._moments(*few)}</details>"
        )

    def _highlight(self) -> str:
        options = "".join(
            f'<option value="{number}">{text(shorten(name, 60))}</option>'
            for name, number in self.numbers.items()
        )
        return (
            '<p class="controls"><label for="job">Highlight in all charts</label>'
            f'<select id="job"><option value="-1">all jobs</option>{options}</select></p>'
        )

    def _moments(self, seconds: Any, bands: Any) -> str:
        names = [_name(name) for name in self.report.timeline.names]
        rows = []
        for at, moment in enumerate(seconds):
            order = np.argsort(-bands[:, at], kind="stable")[:4]
            most = ", ".join(
                f"{names[row]} {format_bytes(bands[row, at])}" for row in order if bands[row, at]
            )
            rows.append([f"{moment:.3f}", format_bytes(int(bands[:, at].sum())), most or "none"])
        head = ["second", "together", "those that held the most"]
        return table("The highest moment of each interval", head, rows, words=(2,))

    def _lanes(self) -> str:
        spans, report = self.report.spans, self.report
        if not len(spans):
            return "<p>No steps were recorded.</p>"
        whole = float(spans.stop.max() - spans.start.min())
        found, pause = stretches(spans, whole / 2000)
        self.charts.lanes(found)
        notes = [
            f"Steps of one job with less than {format_seconds(pause)} between them are one bar, "
            "and of shorter ones the longest of each interval is shown."
        ]
        recorded = len(set(zip(spans.job.tolist(), spans.step.tolist(), strict=True)))
        steps = sum(job.steps - job.resumed_steps for job in report)
        if recorded < steps:
            notes.append(
                f"{recorded:,} of {steps:,} steps were recorded, of a long run the first and the "
                "last; between them the lanes seem empty."
            )
        idle = idle_text(report.idle_seconds, report.lanes * report.seconds)
        busy = []
        for lane in np.unique(spans.lane).tolist():
            own = spans.lane == lane
            took = float((spans.stop - spans.start)[own].sum())
            jobs = len(np.unique(spans.job[own]))
            share = f"{took / whole:.1%}" if whole > 0 and recorded >= steps else "-"
            busy.append([f"lane {lane}", format_seconds(took), share, str(jobs)])
        head = ["lane", "ran steps for", "of the time", "jobs"]
        return (
            (f"<p>The {text(idle)}.</p>" if idle else "")
            + _controls()
            + self._chart("lanes", "Which job's steps each lane ran when; the table has numbers")
            + "".join(f'<p class="soft">{text(note)}</p>' for note in notes)
            + table("What each lane did", head, busy)
        )

    def _losses(self) -> str:
        losses = {job.name: job.losses for job in self.report if len(job.losses)}
        parts = ["<p>No step has told a loss.</p>"]
        if losses:
            self.charts.lines("loss", "loss", losses)
            chart = self._chart("loss", "The loss of each job over its steps")
            parts = [chart, self._notes("loss")]
        metrics = metrics_of_jobs(self.report)
        for place, (name, values) in enumerate(list(metrics.items())[:_METRICS]):
            key = f"metric-{place}"
            self.charts.lines(key, name, values)
            parts += [f"<h3>{_name(name)}</h3>", self._chart(key, f"{visible(name)} of each job")]
            parts.append(self._notes(key))
        if len(metrics) > _METRICS:
            left = ", ".join(shorten(name) for name in list(metrics)[_METRICS:])
            parts.append(f'<p class="soft">In report.json only: {text(left)}.</p>')
        broken = [n for n, ls in losses.items() if not np.isfinite(np.asarray(ls, float)).all()]
        if broken:
            names = ", ".join(map(_name, broken))
            parts.append(f'<p class="bad">Not all losses are finite numbers: {names}.</p>')
        return "".join(parts) + losses_table(losses, self._job) + metrics_table(metrics, self._job)

    def _alone(self) -> str:
        report = self.report
        peaks = {job.name: job.solo_peak_bytes for job in report if job.solo_peak_bytes is not None}
        if not peaks:
            return "<p>No job's own need is known.</p>"
        widest = max(*peaks.values(), report.budget_bytes, 1)
        rows = []
        for job in sorted(report, key=lambda job: -(job.solo_peak_bytes or 0)):
            if job.solo_peak_bytes is None:
                rows.append([self._job(job.name), "unknown", "", "", ""])
                continue
            share = job.solo_peak_bytes / report.budget_bytes if report.budget_bytes else math.nan
            rows.append(
                [
                    self._job(job.name),
                    format_bytes(job.solo_peak_bytes),
                    "-" if math.isnan(share) else f"{share:.1%}",
                    _bar(job.solo_peak_bytes / widest, report.budget_bytes / widest),
                    format_bytes(job.peak_bytes),
                ]
            )
        total = report.side_by_side_bytes
        sum_up = f"<p>Side by side they need {format_bytes(total)}.</p>" if total else ""
        head = ["job", "alone", "of the budget", "against the budget (dashed)", "in this run"]
        return sum_up + table("The most that one step holds when the job runs alone", head, rows)

    def _decisions(self) -> str:
        report = self.report
        ran = [
            [self._job(job.name), text(job.captured), "<br>".join(map(text, _reasons(job)))]
            for job in report
            if _reasons(job) or job.captured != "captured"
        ]
        told = decision_tables(report, self._job)
        if ran:
            head = ["job", "its steps ran", "why, and notes"]
            told += table("How steps ran", head, ran, words=(0, 1, 2))
        return told or "<p>Nothing had to be decided: no job waited or ran opaque.</p>"

    def _jobs(self) -> str:
        rows = [
            [
                self._job(job.name),
                text(job.state.replace("_", " ")),
                f"{job.steps:,}",
                f"{job.losses[-1]:.4g}" if len(job.losses) else "-",
                f"{job.steps_per_second:.1f}",
                format_seconds(job.wall_seconds),
                format_bytes(job.peak_bytes),
                text(_first_line(job)),
            ]
            for job in self.report
        ]
        head = ["job", "state", "steps", "last loss", "steps/s", "time", "peak", "error"]
        return table("The jobs of the run", head, rows, words=(0, 1, 7))

    def _footer(self) -> str:
        versions = ", ".join(f"{name} {value}" for name, value in self.report.versions.items())
        return f'<footer><p class="soft">{text(versions)}</p></footer>'

    def _job(self, name: str) -> str:
        from waterflow.report.charts import colour

        shade = colour(self.numbers.get(name, 0))
        swatch = f'<span class="swatch" style="background:{shade}"></span>'
        return f'<span class="job">{swatch}{_name(name)}</span>'

    def _chart(self, key: str, label: str) -> str:
        return f'<div class="chart" id="chart-{key}" role="img" aria-label="{text(label)}"></div>'

    def _notes(self, key: str) -> str:
        return "".join(f'<p class="soft">{text(n)}</p>' for n in self.charts.notes.get(key, []))


def _name(name: str) -> str:
    # bdi: letters written from right to left do not turn what follows.
    return f"<bdi>{text(name) or '(no name)'}</bdi>"


def _controls(more: str = "") -> str:
    moves = {"in": "zoom in", "out": "zoom out", "left": "earlier", "right": "later", "all": "all"}
    buttons = "".join(
        f'<button type="button" data-move="{move}">{words}</button>'
        for move, words in moves.items()
    )
    return (
        f'<div class="controls" role="group" aria-label="Time shown">{buttons}{more}'
        '<output class="soft" data-shown>drag over a chart to zoom</output></div>'
    )


def _bar(share: float, budget: float) -> str:
    line = f'<b style="left:{100 * budget:.2f}%"></b>' if budget else ""
    return f'<span class="bar"><i style="width:{100 * share:.2f}%"></i>{line}</span>'


def _reasons(job: JobReport) -> list[str]:
    return list(dict.fromkeys([*job.notes, *job.tiers]))


def _first_line(job: JobReport) -> str:
    lines = (job.error or "").strip().splitlines()
    return f"{job.error_type or 'error'}: {lines[0]}"[:200] if lines else ""
