"""The charts of the report's page, by bokeh, whose part of a page is a quarter of plotly's.

Imported when a page is written. Colours are those of Okabe and Ito that stand out on white and on
black, told apart by the colour-blind; from the eighth job on patterns and dashes tell jobs apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.models import ColumnDataSource, HoverTool, Label, Range1d, TapTool, WheelZoomTool
from bokeh.plotting import figure

from waterflow.common.html import shorten
from waterflow.common.units import format_bytes, unit_of
from waterflow.report.thinning import Stretch, at_most, thin_bands, thin_line

#: A `report.report.Report`, whose module imports this one.
Report: TypeAlias = Any

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c")
_PATTERNS = (" ", "/", ".", "x", "-", "|", "o")
_DASHES: tuple[Any, ...] = ([], [8, 3], [2, 2], [8, 3, 2, 3], [14, 4], [4, 4], [1, 4])
_INK = "#6e7781"
_POINTS = 120_000  # of all jobs' bands together, and of all their losses
_NAMED = 3  # jobs that a moment's tooltip names
_SHARE = 0.25  # a budget of which less is used is above the picture at first


def colour(number: int) -> str:
    """A job's colour, by its place in the report."""
    return PALETTE[number % len(PALETTE)]


def pattern(number: int) -> str:
    """The pattern on a job's colour."""
    return _PATTERNS[number // len(PALETTE) % len(_PATTERNS)]


def _new(label: str, height: int, **more: Any) -> Any:
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="xbox_zoom",
        y_axis_label=label,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **more,
    )
    chart.add_tools(WheelZoomTool(dimensions="width", modifiers="ctrl"), TapTool())
    chart.xgrid.grid_line_color = None
    chart.ygrid.grid_line_color, chart.ygrid.grid_line_alpha = _INK, 0.3
    return chart


class Charts:
    """The charts of one report; `json` has all of them for bokeh's script.

    Attributes:
        notes: of each chart, by its name, what was left out or scaled so that it can be shown.
    """

    def __init__(self, report: Report, numbers: Mapping[str, int]) -> None:
        """Take the report, and the number that gives a job its colour, by name."""
        self._report = report
        self._numbers = numbers
        self._roots: dict[str, Any] = {}
        self.notes: dict[str, list[str]] = {}
        self._span = _range(report)
        self._x = Range1d(*self._span, bounds=self._span)

    def names(self) -> list[str]:
        """Of the charts made."""
        return list(self._roots)

    def memory(self) -> None:
        """Memory over time: a band a job, the line of the budget, the peak named."""
        report = self._report
        everything = report.timeline.bands()
        bands, scaled = at_most(everything[1], report.peak_bytes)
        columns = min(1500, max(300, _POINTS // max(len(bands), 1)))
        seconds, bands = thin_bands(everything[0], bands, columns)
        total = bands.sum(axis=0)
        peak = report.peak_bytes or int(total.max(initial=0))
        unit, size = unit_of(peak or report.budget_bytes)
        top = max(peak, 1) * 1.18
        if report.budget_bytes and peak >= _SHARE * report.budget_bytes:
            top = max(top, report.budget_bytes * (1.15 if _is_close(report) else 1.08))
        chart = _new(
            f"memory in {unit}", 380, x_range=self._x, y_range=Range1d(0, top / size), name="memory"
        )
        self._bands(chart, seconds, bands / size)
        self._total(chart, seconds, bands, size)
        _peak(chart, seconds, total, peak, size)
        if report.budget_bytes:
            left = len(seconds) and seconds[int(total.argmax())] > sum(self._span) / 2
            above = 20 if _is_close(report) else 3  # over the peak's own label
            _budget(chart, report.budget_bytes, size, self._span, bool(left), above)
        chart.tags = [report.budget_bytes * 1.08 / size, top / size]
        chart.xaxis.axis_label = "seconds since the start"
        self._roots["memory"] = chart
        notes = self.notes.setdefault("memory", [])
        if len(seconds) < len(everything[0]):
            notes.append(
                f"{len(seconds):,} of {len(everything[0]):,} samples are shown: of each interval "
                "the moment at which all jobs together held the most."
            )
        if scaled:
            notes.append(
                f"At {scaled:,} of {len(everything[0]):,} samples the jobs' own samples, which are "
                "of slightly different moments, add up to more than the exact peak: the bands "
                "there are scaled to it."
            )

    def _bands(self, chart: Any, seconds: Any, bands: Any) -> None:
        tops = np.cumsum(bands, axis=0)
        held = np.flatnonzero((bands > 0).any(axis=1))
        xs, ys, jobs = [], [], []
        for row in held:
            some = np.flatnonzero(bands[row] > 0)
            part = slice(some[0], min(some[-1] + 2, len(seconds)))
            x = np.repeat(seconds[part], 2)[1:].astype(np.float32)
            upper = np.repeat(tops[row, part], 2)[:-1]
            lower = np.repeat(tops[row, part] - bands[row, part], 2)[:-1]
            xs.append(np.concatenate((x, x[::-1])))
            ys.append(np.concatenate((upper, lower[::-1])).astype(np.float32))
            jobs.append(self._report.timeline.names[row])
        self._patches(chart, xs, ys, jobs)

    def _patches(self, chart: Any, xs: list[Any], ys: list[Any], jobs: list[str]) -> None:
        numbers = [self._numbers.get(job, 0) for job in jobs]
        data = {
            "xs": xs,
            "ys": ys,
            "job": numbers,
            "name": [shorten(job) for job in jobs],
            "colour": [colour(number) for number in numbers],
            "pattern": [pattern(number) for number in numbers],
        }
        drawn = chart.patches(
            "xs",
            "ys",
            source=ColumnDataSource(data, name="jobs"),
            fill_color="colour",
            line_color="colour",
            line_width=0.5,
            hatch_pattern="pattern",
            hatch_color="white",
            hatch_alpha=0.6,
            hatch_scale=8,
            nonselection_fill_alpha=0.15,
            nonselection_hatch_alpha=0.1,
        )
        # At the pointer: the middle of a band may be far from it, or outside what is zoomed to.
        chart.add_tools(
            HoverTool(
                renderers=[drawn],
                tooltips=[("job", "@name")],
                attachment="below",
                point_policy="follow_mouse",
            )
        )

    def _total(self, chart: Any, seconds: Any, bands: Any, size: float) -> None:
        names = [shorten(name, 24) for name in self._report.timeline.names]
        most = np.argsort(-bands, axis=0, kind="stable")[:_NAMED]
        told = {
            f"most{place}": [
                f"{names[j]} {format_bytes(bands[j, at])}" if bands[j, at] else "-"
                for at, j in enumerate(row)
            ]
            for place, row in enumerate(most)
        }
        total = bands.sum(axis=0)
        source = ColumnDataSource(
            {
                "x": seconds,
                "y": total / size,
                "sum": [format_bytes(value) for value in total],
                **told,
            }
        )
        chart.step("x", "y", source=source, mode="after", line_color=_INK, line_width=1)
        # Steps cannot be hovered over, a line can.
        line = chart.line("x", "y", source=source, line_alpha=0)
        tips = [("second", "@x{0.000}"), ("together", "@sum")]
        # A row each, so that it fits beside the pointer on a phone.
        tips += [("most" if not place else "then", f"@{key}") for place, key in enumerate(told)]
        chart.add_tools(
            HoverTool(renderers=[line], tooltips=tips, mode="vline", attachment="horizontal")
        )

    def lanes(self, found: Sequence[Stretch]) -> None:
        """A row for each lane: which job's steps ran when."""
        spans = self._report.spans
        lanes = sorted({stretch.lane for stretch in found}, reverse=True)
        chart = _new(
            "",
            100 + 42 * len(lanes),
            x_range=self._x,
            y_range=[f"lane {lane}" for lane in lanes],
            name="lanes",
        )
        numbers = [self._numbers.get(spans.names[one.job], 0) for one in found]
        data = {
            "lane": [f"lane {one.lane}" for one in found],
            "start": np.array([one.start for one in found]),
            "stop": np.array([one.stop for one in found]),
            "job": numbers,
            "name": [shorten(spans.names[one.job]) for one in found],
            "steps": [
                str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
                for one in found
            ],
            "colour": [colour(number) for number in numbers],
            "pattern": [pattern(number) for number in numbers],
        }
        drawn = chart.hbar(
            y="lane",
            left="start",
            right="stop",
            height=0.8,
            source=ColumnDataSource(data, name="jobs"),
            fill_color="colour",
            line_color="colour",
            hatch_pattern="pattern",
            hatch_color="white",
            hatch_alpha=0.6,
            hatch_scale=8,
            nonselection_fill_alpha=0.15,
            nonselection_line_alpha=0.15,
        )
        tips = [("job", "@name"), ("steps", "@steps"), ("from", "@start{0.0000} s")]
        tips.append(("to", "@stop{0.0000} s"))
        chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
        chart.xaxis.axis_label = "seconds since the start"
        self._roots["lanes"] = chart

    def lines(self, key: str, label: str, values: Mapping[str, Any]) -> None:
        """One line a job over its steps.

        Args:
            key: the chart's name.
            label: of its axis, as text.
            values: by job, one number a step, or pairs of the step and the number.
        """
        columns = {name: _columns(numbers) for name, numbers in values.items()}
        finite = [y[np.isfinite(y)] for _, y in columns.values()]
        known = np.concatenate(finite) if finite else np.zeros(0)
        log = bool(len(known)) and known.min() > 0 and known.max() > 50 * known.min()
        axis = shorten(label, 30) + (" (logarithmic)" if log else "")
        chart = _new(axis, 320, y_axis_type="log" if log else "linear", name=key)
        each = max(_POINTS // max(len(columns), 1), 200)
        xs, ys = [], []
        for steps, numbers in columns.values():
            places, kept = thin_line(numbers, each)
            xs.append(steps[places.astype(np.int64) - 1])
            ys.append(np.where(np.isfinite(kept), kept, np.nan))
        numbers = [self._numbers.get(name, 0) for name in columns]
        dashes = [_DASHES[n // len(PALETTE) % len(_DASHES)] for n in numbers]
        data = {
            "xs": xs,
            "ys": ys,
            "job": numbers,
            "name": [shorten(name) for name in columns],
            "colour": [colour(number) for number in numbers],
            "dash": dashes,
        }
        drawn = chart.multi_line(
            "xs",
            "ys",
            source=ColumnDataSource(data, name="jobs"),
            line_color="colour",
            line_dash="dash",
            line_width=2,
            nonselection_line_alpha=0.12,
        )
        alone = [i for i, y in enumerate(ys) if np.isfinite(y).sum() == 1]  # a line needs two
        if alone:
            chart.scatter(
                [float(xs[i][np.isfinite(ys[i])][0]) for i in alone],
                [float(ys[i][np.isfinite(ys[i])][0]) for i in alone],
                color=[data["colour"][i] for i in alone],
                size=7,
            )
        tips = [("job", "@name"), ("step", "$x{0}"), (shorten(label, 30), "$y{0.0000e+0}")]
        chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips, line_policy="nearest"))
        chart.xaxis.axis_label = "step"
        self._roots[key] = chart
        left_out = sum(len(y) for _, y in columns.values()) - sum(map(len, ys))
        if left_out:
            self.notes.setdefault(key, []).append(
                f"{sum(map(len, ys)):,} of {left_out + sum(map(len, ys)):,} numbers are shown: of "
                "each interval of steps the lowest and the highest."
            )

    def json(self) -> str:
        """All charts, for `Bokeh.embed.embed_items`; safe inside a script element."""
        if not self._roots:
            return "null"
        document = Document()
        for root in self._roots.values():
            document.add_root(root)
        documents, items = standalone_docs_json_and_render_items(list(self._roots.values()))
        item = items[0].to_json()
        named = {root.id: name for name, root in self._roots.items()}
        item["roots"] = {key: f"chart-{named[key]}" for key in item["roots"]}
        text = serialize_json({"documents": documents, "items": [item]}, pretty=False)
        return (
            text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        )


def _range(report: Report) -> tuple[float, float]:
    starts = np.concatenate((report.timeline.seconds, report.spans.start))
    stops = np.concatenate((report.timeline.seconds, report.spans.stop))
    if not len(starts):
        return 0.0, 1.0
    return float(starts.min()), max(float(stops.max()), float(starts.min()) + 1e-6)


def _peak(chart: Any, seconds: Any, total: Any, peak: int, size: float) -> None:
    if not len(seconds):
        return
    at = float(seconds[int(total.argmax())])
    chart.scatter(
        [at], [peak / size], size=9, fill_color="white", line_color="#a40e26", line_width=2.5
    )
    right = at > (seconds[0] + seconds[-1]) / 2
    chart.add_layout(
        Label(
            x=at,
            y=peak / size,
            x_offset=-8 if right else 8,
            y_offset=6,
            text=f"peak {format_bytes(peak)}",
            text_align="right" if right else "left",
            text_font_size="13px",
            text_font_style="bold",
            tags=["ink"],
        )
    )


def _is_close(report: Report) -> bool:
    """Whether the names of the peak and of the budget would lie on each other."""
    share = report.peak_bytes / report.budget_bytes if report.budget_bytes else 0.0
    return 0.85 < share < 1.15


def _budget(
    chart: Any, budget: int, size: float, span: tuple[float, float], left: bool, above: int
) -> None:
    chart.hspan(y=[budget / size], line_color=_INK, line_dash="dashed", line_width=2)
    # On the side where the peak is not, so that the two never lie on each other.
    chart.add_layout(
        Label(
            x=span[0] if left else span[1],
            y=budget / size,
            x_offset=6 if left else -6,
            y_offset=above,
            text=f"budget {format_bytes(budget)}",
            text_align="left" if left else "right",
            text_font_size="13px",
            tags=["ink"],
        )
    )


def _columns(numbers: Any) -> tuple[Any, Any]:
    values = np.asarray(list(numbers), dtype=np.float64)
    if values.ndim == 2 and values.shape[1] == 2:
        return values[:, 0], values[:, 1]
    values = values.reshape(-1)
    return np.arange(1, len(values) + 1, dtype=np.float64), values


def script() -> str:
    """Bokeh's own script, without network."""
    from bokeh.resources import INLINE
    from bokeh.settings import settings

    settings.minified.set_value(True)
    return "\n".join(INLINE.js_raw[:1])
