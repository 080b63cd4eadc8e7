"""How plans and studies look: tables for a terminal, pictures for a file.

Like `waterflow.report.memory_plot` it uses matplotlib's objects alone, never `pyplot`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from waterflow.common.units import format_bytes
from waterflow.report.letters import draw_as_text, drawable
from waterflow.report.memory_plot import memory_png
from waterflow.report.table import Column, FittedTable
from waterflow.study.estimate import PolicyEstimate, timeline_of
from waterflow.study.results import MaxBatch, Pair, Plan

_SIMULATED = "overlap and speed are simulated, from times estimated for {}; nothing was run"


def plan_table(plan: Plan) -> FittedTable:
    """One row per policy: whether the jobs fit, and what it makes of them."""
    title = f"{len(plan.jobs)} jobs {'fit' if plan.fits else 'do not fit'}"
    if len(plan.jobs) == 1:
        title = f"1 job {'fits' if plan.fits else 'does not fit'}"
    title = f"{title} {format_bytes(plan.memory_bytes)}"
    table = _table(title, "policy", "peak", "overlap", "speed")
    for name, found in plan.policies.items():
        cells = ["does not fit"] + [""] * 2 if found is None else _cells(found)
        table.add_row(name, *cells)
    lines = [
        f"{job.name}{'' if job.batch is None else f', batch {job.batch}'}: "
        f"{format_bytes(job.persistent_bytes)} all the time, {format_bytes(job.solo_bytes)} alone "
        f"({job.source} profile)"
        for job in plan.jobs
    ]
    return table.add_below([*lines, *_who_goes_first(plan), _SIMULATED.format(plan.hardware)])


def _who_goes_first(plan: Plan) -> list[str]:
    """Who is let in and who waits, where not all fit; what each gets, where some go first."""
    lines = []
    if plan.waiting or plan.refused:
        lines.append(f"a run lets in first: {', '.join(plan.first) or 'nobody'}")
    if plan.waiting:
        lines.append(f"then, as room becomes free: {', '.join(plan.waiting)}")
    if plan.refused:
        lines.append(f"too large even alone: {', '.join(plan.refused)}")
    flow = plan.policies.get("flow")
    if flow is not None and len({(job.priority, job.weight) for job in plan.jobs}) > 1:
        each = (
            f"{job.name} ({job.priority}, weight {job.weight:g}) {speed:.0%}"
            for job, speed in zip(plan.jobs, flow.speeds, strict=True)
        )
        lines.append(f"speed over alone under flow, throttling aside: {', '.join(each)}")
    return lines


def max_batch_table(found: MaxBatch) -> FittedTable:
    """One row per policy: the largest batches together, and what the policy makes of them."""
    title = f"largest batches under {format_bytes(found.memory_bytes)}"
    table = _table(title, "policy", *found.names, "of alone", "peak", "overlap", "speed")
    table.add_row("alone", *map(str, found.solo), "100.0%", "", "", "")
    for name, best in found.policies.items():
        if best is None:
            table.add_row(name, *["-"] * len(found.names), "does not fit", "", "", "")
        else:
            batches = map(str, best.batch)
            table.add_row(name, *batches, f"{best.ratio:.1%}", *_cells(best.outlook))
    return table.add_below([_SIMULATED.format(found.hardware)])


def pair_table(pairs: Sequence[Pair]) -> FittedTable:
    """One row per pair of candidates, the best first."""
    title = "candidates to train together, the best pair first"
    table = _table(title, "pair", "batches", "samples/s", "peak", "overlap", "speed")
    for one in pairs:
        batches = " + ".join("as given" if size is None else str(size) for size in one.batch)
        cells = _cells(one.outlook)
        table.add_row(" + ".join(one.names), batches, f"{one.speed:.2f}x", *cells)
    note = "samples/s: against taking turns, each at its largest batch alone"
    return table.add_below([note, "all but the peak is simulated from estimated times"])


def draw_plan(plan: Plan, picture_format: str) -> bytes:
    """Memory over time per job, under the policy predicted to be the quickest."""
    fitting = [found for found in plan.policies.values() if found is not None]
    if not fitting:
        return _empty(f"does not fit {format_bytes(plan.memory_bytes)}", picture_format)
    best = min(fitting, key=lambda found: found.seconds)
    return memory_png(
        timeline_of(best, plan.subjects),
        budget_bytes=plan.memory_bytes,
        peak_bytes=best.peak_bytes,
        picture_format=picture_format,
        simulated=True,
    )


def draw_frontier(found: MaxBatch, picture_format: str) -> bytes:
    """Overlap against the batch, as a share of the batch alone, a line per policy."""
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, rows in found.frontier.items():
        if rows:
            ratios, overlaps = zip(*rows, strict=True)
            axes.plot(ratios, overlaps, marker="o", label=name)
    axes.set_xlabel("batch, as a share of the largest batch alone")
    axes.set_ylabel("share of the time with two lanes at work (simulated)")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(-0.02, 1.02)
    names = " + ".join(drawable(name) for name in found.names)
    title = axes.set_title(f"{names}, {format_bytes(found.memory_bytes)}")
    draw_as_text([title])
    axes.legend()
    return _bytes(figure, picture_format)


def draw_speed_by_limit(rows: Sequence[Mapping[str, Any]], picture_format: str = "png") -> bytes:
    """What jobs do under memory limits, a line per job (AntMan, Figure 10).

    Args:
        rows: with `model`, `limit_ratio` (over the bytes that it needs without a limit) and
            `speed_ratio` (over its speed then), as of `benchmarks.elastic_memory`; rows of limits
            that were refused have no speed, and end their line with a cross.
        picture_format: "png", "svg", or whatever else matplotlib writes.
    """
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _speed_lines(axes, rows)
    axes.set_xlabel("memory limit, as a share of what the job needs without one")
    axes.set_ylabel("speed over that without a limit")
    axes.set_ylim(bottom=0)
    if rows:
        draw_as_text(axes.legend().get_texts())
    return _bytes(figure, picture_format)


def _speed_lines(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        own = sorted(
            (row for row in rows if row["model"] == model), key=lambda row: row["limit_ratio"]
        )
        ran = [(row["limit_ratio"], row["speed_ratio"]) for row in own if "speed_ratio" in row]
        (line,) = axes.plot(*np.array(ran).reshape(-1, 2).T, marker="o", label=drawable(model))
        refused = [row["limit_ratio"] for row in own if "speed_ratio" not in row]
        if refused:
            axes.plot(max(refused), 0, "x", color=line.get_color(), clip_on=False)


def _empty(text: str, picture_format: str) -> bytes:
    figure = Figure(figsize=(6, 2), dpi=100)
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return _bytes(figure, picture_format)


def _bytes(figure: Figure, picture_format: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=picture_format)
    return buffer.getvalue()


def _cells(found: PolicyEstimate) -> list[str]:
    return [
        format_bytes(found.peak_bytes),
        f"{found.overlap:.0%}",
        f"{found.speedup:.2f}x",
    ]


def _table(title: str, first: str, *others: str) -> FittedTable:
    return FittedTable(title, Column(first, wraps=True), *map(Column, others))
