"""The picture of a run: memory over time, one band per job, under the line of the budget.

Uses matplotlib's objects alone. `pyplot` keeps figures and a backend for the whole process, and
that process is the user's: drawing a report must not change their plots or open a window.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from waterflow.common.units import format_bytes, format_seconds, unit_of
from waterflow.report.letters import draw_as_text, drawable
from waterflow.report.thinning import at_most, idle_stretches, thin_bands
from waterflow.report.timeline import BytesArray, FloatArray, Spans, Timeline

_MARK = "#a40e26"
_SHARE = 0.1  # a budget of which less is used is above the picture
_CLOSE = 400  # samples in the close-up; a few steps of a few jobs
_FORMATS = ("png", "svg", "pdf")


def memory_png(
    timeline: Timeline,
    *,
    budget_bytes: int = 0,
    peak_bytes: int = 0,
    picture_format: str = "png",
    simulated: bool = False,
    spans: Spans | None = None,
    idle: str = "",
) -> bytes:
    """Return the picture of `timeline` as the bytes of a file, by default a PNG, 1200 x 600.

    Above the whole run; below, where that is too dense to see one job's memory fall while another's
    rises, the moments around the peak.

    `simulated` says so above it. `budget_bytes` draws the budget, 0 leaves it out; `peak_bytes` is
    the exact peak for the title,
    which may lie between two samples, 0 takes the samples' own. With `spans` the stretches in which
    no lane ran a step are marked; `idle` says below what lanes waited for. `picture_format` is
    "png", "svg" or "pdf"; raises ValueError for another.
    """
    if picture_format not in _FORMATS:
        raise ValueError(f"the picture is one of {', '.join(_FORMATS)}, not {picture_format!r}")
    figure = Figure(figsize=(12, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    if len(timeline) <= 2 * _CLOSE:
        above = figure.add_subplot()
        draw(above, timeline, budget_bytes, peak_bytes)
    else:
        above, below = figure.subplots(2, 1)
        draw(above, timeline, budget_bytes, peak_bytes)
        draw_close_up(below, timeline, budget_bytes, peak_bytes)
    if spans is not None:
        _mark_idle(above, spans)
    if idle:
        figure.supxlabel(idle, fontsize="small")
    if simulated:
        figure.suptitle("simulated, from estimated times", x=0.99, ha="right", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=picture_format)
    return buffer.getvalue()


def draw(axes: Any, timeline: Timeline, budget_bytes: int = 0, peak_bytes: int = 0) -> None:
    """Draw the picture of `timeline` into matplotlib's `axes`, to be part of a larger figure."""
    seconds, bands = timeline.bands()
    seconds, bands = thin_bands(seconds, at_most(bands, peak_bytes)[0])
    peak = peak_bytes or int(bands.sum(axis=0).max(initial=0))
    shown = _stack(axes, seconds, bands, budget_bytes, peak)
    handles: list[Any] = []
    if len(seconds):
        handles += [Patch(color=colour) for colour in _colours(len(timeline.names))]
    labels = [drawable(name, 32) for name in timeline.names] if handles else []
    if budget_bytes:
        handles.append(Line2D([], [], color="black", linestyle="--"))
        above = "" if shown else ", above the picture"
        labels.append(f"budget {format_bytes(budget_bytes)}{above}")
    axes.set_title(f"memory of {len(timeline.names)} jobs, together at most {format_bytes(peak)}")
    _add_legend(axes, handles, labels)


def draw_close_up(
    axes: Any, timeline: Timeline, budget_bytes: int = 0, peak_bytes: int = 0
) -> None:
    """Draw the moments around the peak of `timeline` into matplotlib's `axes`."""
    seconds, bands = timeline.bands()
    bands = at_most(bands, peak_bytes)[0]
    peak = int(bands.sum(axis=0).argmax()) if len(seconds) else 0
    first = max(0, min(peak - _CLOSE // 2, len(seconds) - _CLOSE))
    window = slice(first, first + _CLOSE)
    _stack(axes, seconds[window], bands[:, window], budget_bytes, peak_bytes)
    axes.set_title("the moments around the peak", fontsize="medium")


def _stack(
    axes: Any, seconds: FloatArray, bands: BytesArray, budget_bytes: int, peak_bytes: int
) -> bool:
    """Draws it; whether the budget is in the picture."""
    total = bands.sum(axis=0)
    peak = peak_bytes or int(total.max(initial=0))
    unit, size = unit_of(peak or budget_bytes)
    if len(seconds):
        colours = _colours(len(bands))
        axes.stackplot(seconds, bands / size, colors=colours, step="post", linewidth=0)
        axes.set_xlim(seconds[0], max(seconds[-1], seconds[0] + 1e-6))
        _mark_peak(axes, seconds, total, peak, size)
    else:
        axes.text(0.5, 0.5, "no memory samples", ha="center", transform=axes.transAxes)
    # Of a budget that is hardly used the picture would be empty.
    shown = budget_bytes > 0 and (peak == 0 or peak >= _SHARE * budget_bytes)
    if shown:
        axes.axhline(budget_bytes / size, color="black", linestyle="--", linewidth=1.2)
    axes.set_ylim(0, max(peak * 1.12, budget_bytes * 1.06 if shown else 0, 1) / size)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel(f"memory in {unit}")
    return shown


def _mark_peak(axes: Any, seconds: FloatArray, total: BytesArray, peak: int, size: float) -> None:
    if peak <= 0:
        return
    at = float(seconds[int(total.argmax())])
    right = at > (seconds[0] + seconds[-1]) / 2
    # The exact peak may lie between two samples: then a line leads to it.
    axes.vlines(at, total.max() / size, peak / size, color=_MARK, linestyle=":")
    axes.plot([at], [peak / size], "o", ms=6, mfc="white", mec=_MARK, mew=1.8, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(peak)}",
        (at, peak / size),
        (-8 if right else 8, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize="small",
        bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": _MARK, "alpha": 0.9},
    )


def _mark_idle(axes: Any, spans: Spans) -> None:
    left, right = axes.get_xlim()
    for start, stop in idle_stretches(spans, (right - left) / 20):
        axes.axvspan(start, stop, fc="none", ec="0.35", hatch="//", lw=0, alpha=0.5)
        axes.annotate(
            f"no step ran: {format_seconds(stop - start)}",
            ((start + stop) / 2, 0.02),
            xycoords=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            rotation=90,
            fontsize="small",
            bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.8},
        )


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
    draw_as_text(legend.get_texts())
