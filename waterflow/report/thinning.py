"""Fewer points that show the same: extremes stay, and nothing is averaged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from waterflow.report.timeline import BytesArray, FloatArray, Spans, Timeline

_COLUMNS = 1500  # more points than a picture has pixels cost time and show nothing


def thin(timeline: Timeline, columns: int = _COLUMNS) -> tuple[FloatArray, BytesArray]:
    """Return `timeline.bands()` with about `columns` points at most, the highest of each interval.

    Taking every n-th sample instead would lose the very peaks that the picture is for.
    """
    return thin_bands(*timeline.bands(), columns)


def thin_bands(
    seconds: FloatArray, bands: BytesArray, columns: int = _COLUMNS
) -> tuple[FloatArray, BytesArray]:
    """The same of bands: seconds[T], bytes[jobs, T]."""
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


def at_most(bands: BytesArray, peak_bytes: int) -> tuple[BytesArray, int]:
    """Bands whose sum is nowhere above the exact peak, and how many moments were scaled for that.

    Each job is sampled on its own. Where samples are far apart, the sum at one moment mixes what
    jobs held at different ones, and may show more than there ever was.

    Args:
        bands: bytes[jobs, T].
        peak_bytes: the exact peak, 0 if it is unknown.
    """
    total = bands.sum(axis=0)
    above = total > peak_bytes if peak_bytes else np.zeros(len(total), dtype=bool)
    if not above.any():
        return bands, 0
    bands = bands.copy()
    bands[:, above] = bands[:, above] * (peak_bytes / total[above])
    return bands, int(above.sum())


def thin_line(values: FloatArray, points: int) -> tuple[FloatArray, FloatArray]:
    """(places, values) of about `points` points: each interval keeps its lowest and highest.

    Values that are not finite break the line; each interval keeps the first of them.
    """
    places = np.arange(1, len(values) + 1, dtype=np.float64)
    if len(values) <= points:
        return places, values
    buckets = max(points // 2 - 2, 1)
    bucket = (np.arange(len(values)) * buckets) // len(values)
    finite = np.isfinite(values)
    order = np.lexsort((np.where(finite, values, np.inf), bucket))
    first = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    order_high = np.lexsort((np.where(finite, values, -np.inf), bucket))
    last = np.flatnonzero(np.diff(bucket[order_high], append=buckets))
    odd = np.flatnonzero(~finite)
    odd = odd[np.flatnonzero(np.diff(bucket[odd], prepend=-1))] if len(odd) else odd
    chosen = (order[first], order_high[last], odd, [0, len(values) - 1])
    keep = np.unique(np.concatenate(chosen).astype(np.int64))
    return places[keep], values[keep]


class Stretch(NamedTuple):
    """Steps of one job on one lane without a visible pause."""

    lane: int
    job: int
    start: float
    stop: float
    first: int
    last: int


def stretches(spans: Spans, pause: float, most: int = 6000) -> tuple[list[Stretch], float]:
    """What each lane ran, and the pause up to which it was joined.

    Groups of one job follow each other within `pause` seconds: one stretch. If there are more than
    `most`, longer pauses are joined, too, and of stretches shorter than the pause the longest of
    each interval of that length stays.
    """
    if not len(spans):
        return [], pause
    order = np.lexsort((spans.start, spans.lane))
    lane, job, step = spans.lane[order], spans.job[order], spans.step[order]
    start, stop = spans.start[order], np.maximum(spans.stop[order], spans.start[order])
    while True:
        new = np.ones(len(lane), dtype=bool)
        same = (lane[1:] == lane[:-1]) & (job[1:] == job[:-1])
        new[1:] = ~(same & (start[1:] - stop[:-1] <= pause))
        heads = np.flatnonzero(new)
        if len(heads) <= most:
            break
        # Too many: those too short to be seen go, but the longest of each interval.
        stops = np.maximum.reduceat(stop, heads)
        took = stops - start[heads]
        interval = (start[heads] / max(pause, 1e-12)).astype(np.int64)
        by = np.lexsort((took, interval, lane[heads]))
        ends = np.diff(interval[by], append=-1) != 0
        ends |= np.diff(lane[heads][by], append=-1) != 0
        keep = np.zeros(len(heads), dtype=bool)
        keep[by[ends]] = True
        keep |= took > pause
        wanted = np.repeat(keep, np.diff(np.append(heads, len(lane))))
        lane, job, step = lane[wanted], job[wanted], step[wanted]
        start, stop = start[wanted], stop[wanted]
        pause = max(pause, 1e-9) * 2
    stops = np.maximum.reduceat(stop, heads)
    firsts, lasts = np.minimum.reduceat(step, heads), np.maximum.reduceat(step, heads)
    columns = (lane[heads], job[heads], start[heads], stops, firsts, lasts)
    return [Stretch(*row) for row in zip(*(c.tolist() for c in columns), strict=True)], pause


def idle_stretches(spans: Spans, shortest: float) -> list[tuple[float, float]]:
    """(start, stop) in s: where between steps no lane ran any, for longer than `shortest`."""
    if not len(spans):
        return []
    order = np.argsort(spans.start, kind="stable")
    until = np.maximum.accumulate(spans.stop[order])
    gaps = np.flatnonzero(spans.start[order][1:] - until[:-1] > shortest)
    return [(float(until[gap]), float(spans.start[order][gap + 1])) for gap in gaps]
