"""How plans and studies look: tables for a terminal, pictures for a file.

Like `waterflow.report.memory_plot` it uses matplotlib's objects alone, never `pyplot`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from waterflow.common.units import format_bytes
from waterflow.report.memory_plot import memory_png
from waterflow.study.estimate import PolicyEstimate, timeline_of
from waterflow.study.results import MaxBatch, Pair, Plan

_SIMULATED = "overlap and speed are simulated, from times estimated for {}; nothing was run"


def plan_table(plan: Plan) -> Table:
    """One row per policy: whether the jobs fit, and what it makes of them."""
    verdict = "fit" if plan.fits else "do not fit"
    table = _table(f"{len(plan.jobs)} jobs {verdict} {format_bytes(plan.memory_bytes)}")
    _columns(table, "policy", "peak", "overlap", "speed")
    for name, found in plan.policies.items():
        cells = ["does not fit"] + [""] * 2 if found is None else _cells(found)
        table.add_row(name, *cells)
    lines = [
        f"{job.name}{'' if job.batch is None else f', batch {job.batch}'}: "
        f"{format_bytes(job.persistent_bytes)} all the time, {format_bytes(job.solo_bytes)} alone "
        f"({job.source} profile)"
        for job in plan.jobs
    ]
    return _caption(table, [*lines, _SIMULATED.format(plan.hardware)])


def max_batch_table(found: MaxBatch) -> Table:
    """One row per policy: the largest batches together, and what the policy makes of them."""
    table = _table(f"largest batches under {format_bytes(found.memory_bytes)}")
    _columns(table, "policy", *found.names, "of alone", "peak", "overlap", "speed")
    table.add_row("alone", *map(str, found.solo), "100.0%", "", "", "")
    for name, best in found.policies.items():
        if best is None:
            table.add_row(name, *["-"] * len(found.names), "does not fit", "", "", "")
        else:
            batches = map(str, best.batch)
            table.add_row(name, *batches, f"{best.ratio:.1%}", *_cells(best.outlook))
    return _caption(table, [_SIMULATED.format(found.hardware)])


def pair_table(pairs: Sequence[Pair]) -> Table:
    """One row per pair of candidates, the best first."""
    table = _table("candidates to train together, the best pair first")
    _columns(table, "pair", "batches", "samples/s", "peak", "overlap", "speed")
    for one in pairs:
        batches = " + ".join("as given" if size is None else str(size) for size in one.batch)
        cells = _cells(one.outlook)
        table.add_row(Text(" + ".join(one.names)), batches, f"{one.speed:.2f}x", *cells)
    note = "samples/s: against taking turns, each at its largest batch alone"
    return _caption(table, [note, "all but the peak is simulated from estimated times"])


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
    axes.set_title(f"{' + '.join(found.names)}, {format_bytes(found.memory_bytes)}")
    axes.legend()
    return _bytes(figure, picture_format)


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


def _table(title: str) -> Table:
    table = Table(title=Text(title), caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.padding, table.collapse_padding = False, (0, 1), True
    return table


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first, overflow="fold", min_width=12)
    for heading in others:
        table.add_column(Text(heading), justify="right", no_wrap=True)


def _caption(table: Table, lines: Sequence[str]) -> Table:
    table.caption = Text("\n".join(lines), style="dim")
    return table
