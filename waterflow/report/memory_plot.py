"""The picture of a run: memory over time, one band per job, under the line of the budget.

Uses matplotlib's objects alone. `pyplot` keeps figures and a backend for the whole process, and
that process is the user's: drawing a report must not change their plots or open a window.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from waterflow.common.units import format_bytes
from waterflow.report.timeline import BytesArray, FloatArray, Timeline

_MIB = 1024**2
_COLUMNS = 1500  # more points than the picture has pixels cost time and show nothing
_CLOSE = 400  # samples in the close-up; a few steps of a few jobs
_FORMATS = ("png", "svg", "pdf")


def memory_png(
    timeline: Timeline,
    *,
    budget_bytes: int = 0,
    peak_bytes: int = 0,
    picture_format: str = "png",
    simulated: bool = False,
) -> bytes:
    """Return the picture of `timeline` as the bytes of a file, by default a PNG, 1200 x 600.

    Above the whole run; below, where that is too dense to see one job's memory fall while another's
    rises, the moments around the peak.

    `simulated` says so above it. `budget_bytes` draws the budget, 0 leaves it out; `peak_bytes` is
    the exact peak for the title,
    which may lie between two samples, 0 takes the samples' own. `picture_format` is "png", "svg" or
    "pdf"; raises ValueError for another.
    """
    if picture_format not in _FORMATS:
        raise ValueError(f"the picture is one of {', '.join(_FORMATS)}, not {picture_format!r}")
    figure = Figure(figsize=(12, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    if len(timeline) <= 2 * _CLOSE:
        draw(figure.add_subplot(), timeline, budget_bytes, peak_bytes)
    else:
        above, below = figure.subplots(2, 1)
        draw(above, timeline, budget_bytes, peak_bytes)
        draw_close_up(below, timeline, budget_bytes)
    if simulated:
        figure.suptitle("simulated, from estimated times", x=0.99, ha="right", fontsize="small")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A job named in letters that the font lacks is no reason to disturb a training script.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format=picture_format)
    return buffer.getvalue()


def thin(timeline: Timeline, columns: int = _COLUMNS) -> tuple[FloatArray, BytesArray]:
    """Return `timeline.bands()` with about `columns` points at most, the highest of each interval.

    Taking every n-th sample instead would lose the very peaks that the picture is for.
    """
    seconds, bands = timeline.bands()
    if len(seconds) <= columns:
        return seconds, bands
    total = bands.sum(axis=0)
    span = max(float(seconds[-1] - seconds[0]), 1e-12)
    bucket = np.minimum(((seconds - seconds[0]) / span * columns).astype(np.int64), columns - 1)
    # Sorted by bucket, then by total: the last entry of each bucket is its highest moment.
    order = np.lexsort((total, bucket))
    last = np.flatnonzero(np.diff(bucket[order], append=columns))
    keep = np.unique(np.concatenate(([0], order[last], [len(seconds) - 1])))
    return seconds[keep], bands[:, keep]


def draw(axes: Any, timeline: Timeline, budget_bytes: int = 0, peak_bytes: int = 0) -> None:
    """Draw the picture of `timeline` into matplotlib's `axes`, to be part of a larger figure."""
    seconds, bands = thin(timeline)
    _stack(axes, seconds, bands, budget_bytes)
    handles: list[Any] = []
    if len(seconds):
        handles += [Patch(color=colour) for colour in _colours(len(timeline.names))]
    labels = [_label(name) for name in timeline.names] if handles else []
    if budget_bytes:
        handles.append(Line2D([], [], color="black", linestyle="--"))
        labels.append(f"budget {format_bytes(budget_bytes)}")
    peak = format_bytes(peak_bytes or int(bands.sum(axis=0).max(initial=0)))
    axes.set_title(f"memory of {len(timeline.names)} jobs, together at most {peak}")
    _add_legend(axes, handles, labels)


def draw_close_up(axes: Any, timeline: Timeline, budget_bytes: int = 0) -> None:
    """Draw the moments around the peak of `timeline` into matplotlib's `axes`."""
    seconds, bands = timeline.bands()
    peak = int(bands.sum(axis=0).argmax()) if len(seconds) else 0
    first = max(0, min(peak - _CLOSE // 2, len(seconds) - _CLOSE))
    window = slice(first, first + _CLOSE)
    _stack(axes, seconds[window], bands[:, window], budget_bytes)
    axes.set_title("the moments around the peak", fontsize="medium")


def _stack(axes: Any, seconds: FloatArray, bands: BytesArray, budget_bytes: int) -> None:
    if len(seconds):
        colours = _colours(len(bands))
        axes.stackplot(seconds, bands / _MIB, colors=colours, step="post", linewidth=0)
        axes.set_xlim(seconds[0], max(seconds[-1], seconds[0] + 1e-6))
    else:
        axes.text(0.5, 0.5, "no memory samples", ha="center", transform=axes.transAxes)
    if budget_bytes:
        axes.axhline(budget_bytes / _MIB, color="black", linestyle="--", linewidth=1.2)
    highest = int(bands.sum(axis=0).max(initial=0))
    axes.set_ylim(0, max(highest, budget_bytes, 1) * 1.06 / _MIB)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("memory in MiB")


def _colours(count: int) -> list[Any]:
    # tab20 has pairs of a dark and a light tone: the dark ones first.
    tones = [*range(0, 20, 2), *range(1, 20, 2)]
    return [colormaps["tab20"](tones[index % 20]) for index in range(count)]


def _add_legend(axes: Any, handles: list[Any], labels: list[str]) -> None:
    if not handles:
        return
    # Top band first, as in the picture.
    legend = axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        ncols=1 + len(handles) // 28,
        fontsize="small",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # "$" in a job's name is a dollar, not a formula


def _label(name: str) -> str:
    name = " ".join(name.encode("utf-8", "replace").decode().split())
    short = name if len(name) <= 32 else f"{name[:31]}…"
    # matplotlib hides labels that begin with an underscore.
    return f"\u200b{short}" if short.startswith("_") else short
