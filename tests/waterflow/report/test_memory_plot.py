"""The picture and the trace: real files, read back."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.image import imread

from waterflow.report.memory_plot import draw, draw_close_up, memory_png
from waterflow.report.perfetto import trace_json
from waterflow.report.report import Spans, Timeline
from waterflow.report.thinning import thin

MIB = 2**20


def picture(timeline, budget_bytes=0):
    return imread(io.BytesIO(memory_png(timeline, budget_bytes=budget_bytes)))[..., :3]


def pixels_of(image, colour):
    return int((np.abs(image - np.array(colour[:3])) < 0.02).all(axis=-1).sum())


def test_each_job_has_its_band():
    names = ["first", "second", "third"]
    timeline = Timeline([0.0, 0.1, 0.2, 1.0], [0, 1, 2, 0], [MIB, 2 * MIB, 4 * MIB, 0], names)
    image = picture(timeline)
    areas = [pixels_of(image, colormaps["tab20"](2 * index)) for index in range(3)]
    assert min(areas) > 1000
    assert areas == sorted(areas)  # more bytes, more area


def test_the_budget_is_drawn_at_its_height():
    timeline = Timeline([0.0, 1.0], [0, 0], [MIB, MIB], ["a"])
    with_budget, without = picture(timeline, 4 * MIB), picture(timeline)
    area = pixels_of(with_budget, colormaps["tab20"](0))
    assert 0 < area < pixels_of(without, colormaps["tab20"](0)) / 2


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(),
        Timeline(names=["never ran"]),
        Timeline([5.0], [0], [7], ["one sample"]),
        Timeline([0.0, 0.0], [0, 0], [0, 0], ["holds nothing"]),
        Timeline([0.0, 1.0], [0, 1], [2**50, 1], ["huge", "tiny"]),
    ],
    ids=repr,
)
def test_odd_timelines_still_give_a_picture(timeline):
    image = picture(timeline, MIB)
    assert image.shape == (600, 1200, 3)
    assert image.std() > 0


def test_any_name_can_be_drawn(recwarn):
    odd = ["$", "a$b$", r"$\frac$", "_x", "two\nlines", "模型", "x" * 500, "", "\ud800", "\x00"]
    timeline = Timeline(np.zeros(10), np.arange(10), np.full(10, MIB), odd)
    assert picture(timeline).std() > 0
    assert not list(recwarn)
    json.loads(trace_json(Spans(), timeline))


def shown_labels(names):
    axes = Figure().add_subplot()
    count = len(names)
    draw(axes, Timeline(np.zeros(count), np.arange(count), np.full(count, MIB), names))
    return [text.get_text() for text in axes.get_legend().get_texts()][::-1]


def test_letters_that_no_font_has_are_escaped(monkeypatch):
    monkeypatch.setattr("waterflow.report.letters._FALLBACKS", ())
    assert shown_labels(["模 a", "é"]) == [r"\u6a21 a", "é"]


def test_the_peak_is_named_on_the_curve_in_the_titles_unit():
    axes = Figure().add_subplot()
    draw(axes, Timeline([0.0, 1.0, 2.0], [0] * 3, [2**30, 2**31, 0], ["a"]), 2**32, 2**31)
    assert axes.get_title().endswith("2.0 GiB")
    assert axes.get_ylabel() == "memory in GiB"
    assert [text.get_text() for text in axes.texts] == ["peak 2.0 GiB"]
    assert axes.texts[0].xy == (1.0, 2.0)


def test_the_sum_of_samples_is_never_above_the_exact_peak():
    axes = Figure().add_subplot()
    draw(axes, Timeline([0.0, 1.0], [0, 1], [3 * MIB, 3 * MIB], ["a", "b"]), peak_bytes=4 * MIB)
    tops = [path.vertices[:, 1].max() for drawn in axes.collections for path in drawn.get_paths()]
    assert max(tops) == pytest.approx(4)


def test_a_small_use_of_a_large_budget_is_seen():
    timeline = Timeline([0.0, 1.0], [0, 0], [MIB, MIB], ["a"])
    large, none = picture(timeline, 2**36), picture(timeline)
    blue = colormaps["tab20"](0)
    assert pixels_of(large, blue) > 0.5 * pixels_of(none, blue)


def test_idle_stretches_are_told():
    timeline = Timeline([0.0, 9.0], [0, 0], [MIB, 0], ["a"])
    spans = Spans([0, 0], [0, 0], [1, 2], [0, 0], [0.0, 8.0], [1.0, 9.0], ["a"])
    told = memory_png(timeline, picture_format="svg", spans=spans, idle="lanes waited for data")
    assert told != memory_png(timeline, picture_format="svg")
    assert b"no step ran: 7.0 s" in told
    assert b"lanes waited for data" in told


def test_a_name_with_an_underscore_is_in_the_legend():
    axes = Figure().add_subplot()
    draw(axes, Timeline([0.0, 1.0], [0, 0], [MIB, MIB], ["_hidden"]), MIB)
    shown = [text.get_text().strip("\u200b") for text in axes.get_legend().get_texts()]
    assert shown == ["budget 1.0 MiB", "_hidden"]


def test_many_jobs_fit():
    names = [f"job {index}" for index in range(60)]
    timeline = Timeline(np.arange(60.0), np.arange(60), np.full(60, MIB), names)
    assert picture(timeline, 90 * MIB).std() > 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=50, max_size=400), st.integers(5, 40))
def test_thinning_keeps_the_peak_and_the_ends(sizes, columns):
    timeline = Timeline(np.arange(len(sizes)) * 0.1, np.zeros(len(sizes), int), sizes, ["a"])
    seconds, bands = thin(timeline, columns)
    assert len(seconds) <= columns + 2
    assert bands.max() == max(sizes)
    assert (seconds[0], seconds[-1]) == (timeline.seconds[0], timeline.seconds[-1])
    assert (np.diff(seconds) > 0).all()


def test_many_samples_are_drawn():
    count = 300_000
    generator = np.random.default_rng(0)
    sizes = generator.integers(0, MIB, count)
    sizes[123_456] = 64 * MIB
    timeline = Timeline(np.sort(generator.random(count)), np.zeros(count, int), sizes, ["a"])
    _, bands = thin(timeline)
    assert bands.max() == 64 * MIB
    assert picture(timeline).std() > 0


def test_the_close_up_holds_the_peak():
    count = 5000
    for place in (0, 2345, count - 1):
        sizes = np.full(count, MIB)
        sizes[place] = 64 * MIB
        axes = Figure().add_subplot()
        draw_close_up(axes, Timeline(np.arange(count) / 10, np.zeros(count, int), sizes, ["a"]))
        left, right = axes.get_xlim()
        assert left <= place / 10 <= right
        assert right - left == pytest.approx(39.9)


def test_other_formats():
    timeline = Timeline([0.0, 1.0], [0, 0], [MIB, 0], ["a"])
    assert b"<svg" in memory_png(timeline, picture_format="svg")
    assert memory_png(timeline, picture_format="pdf").startswith(b"%PDF")
    with pytest.raises(ValueError, match="jpeg"):
        memory_png(timeline, picture_format="jpeg")


def test_drawing_leaves_pyplot_alone(tmp_path):
    code = (
        "import sys; from waterflow.report.memory_plot import memory_png, Timeline;"
        "memory_png(Timeline()); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def make_trace():
    spans = Spans(
        [0, 1, 0], [0, 1, 0], [1, 1, 2], [0, 3, 1], [0.5, 0.6, 0.8], [0.7, 0.9, 0.8], "ab"
    )
    timeline = Timeline([0.2, 0.1], [0, 1], [10, 20], ["a", "b"])
    return json.loads(trace_json(spans, timeline))


def test_the_trace_has_a_named_track_per_lane():
    events = make_trace()["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {1: "lane 0", 2: "lane 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == [
        "a step 1 group 0",
        "b step 1 group 3",
        "a step 2 group 1",
    ]
    assert [span["tid"] for span in spans] == [1, 2, 1]
    assert spans[0]["ts"] == pytest.approx(500_000)
    assert spans[0]["dur"] == pytest.approx(200_000)


def test_the_trace_counts_each_jobs_bytes_in_order_of_time():
    counters = [event for event in make_trace()["traceEvents"] if event["ph"] == "C"]
    assert [(event["name"], event["args"]["bytes"]) for event in counters] == [("b", 20), ("a", 10)]
    assert counters[0]["ts"] < counters[1]["ts"]


def test_every_event_has_what_the_format_asks_for():
    needed = {"M": {"args"}, "X": {"ts", "dur"}, "C": {"ts", "args"}}
    for event in make_trace()["traceEvents"]:
        assert needed[event["ph"]] | {"name", "pid", "tid"} <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
