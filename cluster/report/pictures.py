"""Pictures of simulations: completion times, GPUs in use, the queue; all policies in one.

Matplotlib's objects alone: `pyplot` would keep figures for the whole process.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from waterflow.cluster.simulator.results import Floats, Results
from waterflow.report.letters import draw_as_text, drawable

_POINTS = 1500  # more than the picture has pixels show nothing
_DAY = 86400.0


def completion_times(results: Mapping[str, Results], kind: str = "png") -> bytes:
    """Which share of the jobs is done within a time of their submission."""

    def draw(axes: Axes) -> None:
        for name, found in _named(results):
            times = np.sort(found.completion_times)
            if len(times):
                axes.plot(
                    np.maximum(times, 1.0),
                    np.arange(1, len(times) + 1) / len(times),
                    label=name,
                )
        axes.set(xscale="log", xlabel="seconds from submission", ylabel="share of the jobs done")

    return _picture(draw, kind)


def gpus_in_use(results: Mapping[str, Results], gpus: int, kind: str = "png") -> bytes:
    """GPUs with a job, over time."""

    def draw(axes: Axes) -> None:
        for name, found in _named(results):
            axes.step(*_over_time(found, found.gpus_in_use), where="post", label=name, lw=0.8)
        axes.axhline(gpus, color="0.5", lw=0.8)
        axes.set(xlabel="days", ylabel="GPUs in use", ylim=(0, gpus * 1.05))

    return _picture(draw, kind)


def queue_length(results: Mapping[str, Results], kind: str = "png") -> bytes:
    """Jobs that wait, over time."""

    def draw(axes: Axes) -> None:
        for name, found in _named(results):
            axes.step(*_over_time(found, found.queue_length), where="post", label=name, lw=0.8)
        axes.set(xlabel="days", ylabel="jobs that wait")

    return _picture(draw, kind)


def _named(results: Mapping[str, Results]) -> Iterator[tuple[str, Results]]:
    return ((drawable(name), found) for name, found in results.items())


def _over_time(found: Results, values: np.ndarray) -> tuple[Floats, Floats]:
    """A series thinned to means over equal spans of time, where it is longer than can be seen."""
    times = found.times
    if len(times) <= _POINTS:
        return times / _DAY, values.astype(np.float64)
    edges = np.linspace(times[0], times[-1], _POINTS + 1)
    spans = np.append(np.diff(times), 0.0)
    before = np.concatenate(([0.0], np.cumsum(values * spans)))
    at = np.interp(edges, times, before[:-1])
    return edges[:-1] / _DAY, np.diff(at) / np.diff(edges)


def _picture(draw: Callable[[Axes], None], kind: str) -> bytes:
    figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    if axes.get_legend_handles_labels()[0]:
        draw_as_text(axes.legend(fontsize="small").get_texts())
    axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    # Without a date a picture of equal results is the same file, byte for byte.
    metadata = {"Date": None} if kind == "svg" else {"Software": None} if kind == "png" else None
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
