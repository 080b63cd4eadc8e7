"""The report's page in headless Chromium: what is seen, what can be reached, what never runs."""

import re
import time

import numpy as np
import pytest

from tests.support.browser import Opened, chromium, launch
from waterflow.report.charts import PALETTE
from waterflow.report.decisions import Decision
from waterflow.report.evaluation import Evaluation
from waterflow.report.page import report_page
from waterflow.report.report import JobReport, Report, Spans, Timeline
from waterflow.report.spills import Spill

MIB = 2**20
HOSTILE = [
    "</script><script>document.title='owned'</script>",
    '<img src=x onerror="document.title=1">',
    "\" onmouseover=alert(1) x='",
    "\x00\x07\x1b[31m\ud800",
    "\u202egnirts a\u2028",
    "x" * 300,
    "🚀 模型 عربي",
    "@name{safe} $y ${1+1} {{7*7}}",
]


def make_report(names, steps=40, budget=8 * MIB):
    count = len(names)
    generator = np.random.default_rng(0)
    moments = np.sort(generator.random(count * 20)) * 2
    which = np.tile(np.arange(count), 20)
    held = np.tile(np.arange(1, count + 1) * MIB // count, 20)
    jobs = [
        JobReport(
            name=name,
            state="failed" if place == 1 else "finished",
            error=f"no {name}\nat line 2" if place == 1 else None,
            error_type="ValueError" if place == 1 else None,
            losses=[float(loss) for loss in np.exp(-np.arange(steps) / 10) + place],
            steps=steps,
            captured="opaque step" if place == 0 else "captured",
            notes=[f"opaque because of {name}"] if place == 0 else [],
            solo_peak_bytes=(place + 1) * MIB,
            wall_seconds=1.0,
            peak_bytes=MIB,
        )
        for place, name in enumerate(names)
    ]
    start = np.arange(steps) * 2 / max(steps, 1)
    spans = Spans(
        np.arange(steps) % 2,
        np.arange(steps) % count,
        np.arange(steps) // count + 1,
        np.zeros(steps, int),
        start,
        start + 1 / max(steps, 1),
        names,
    )
    return Report(
        jobs={job.name: job for job in jobs},
        peak_bytes=int(Timeline(moments, which, held, names).peak_bytes()),
        budget_bytes=budget,
        policy="flow",
        lanes=2,
        seconds=2.0,
        timeline=Timeline(moments, which, held, names),
        spans=spans,
        idle_seconds={"data": 1.0},
        decisions=[Decision(0.5, names[0], f"works in 40% of {names[-1]!r}'s time", "throttled")],
    )


@pytest.fixture(scope="module")
def browser():
    chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = launch(playwright)
        yield found
        found.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "report.html"
    path.write_text(report_page(make_report(["first", "second", "third"])), "utf-8")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    path.write_text(report_page(make_report(HOSTILE)), "utf-8")
    return path


def close_to(image, colour):
    wanted = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return int((np.abs(image - wanted) < 0.03).all(axis=-1).sum())


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_curves_are_there_and_nothing_is_loaded(browser, plain, width, scheme):
    opened = Opened(browser, plain, width, color_scheme=scheme)
    bands = opened.pixels("#chart-memory")
    assert min(close_to(bands, colour) for colour in PALETTE[:3]) > 500
    lanes = opened.pixels("#chart-lanes")
    assert min(close_to(lanes, colour) for colour in PALETTE[:3]) > 100
    losses = opened.pixels("#chart-loss")
    assert min(close_to(losses, colour) for colour in PALETTE[:3]) > 100
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.requests == [opened.url]
    assert opened.complaints == []
    opened.page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_stay_text(browser, hostile, width):
    opened = Opened(browser, hostile, width)
    assert opened.page.title() == "waterflow: 8 jobs on cpu"
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("script").count() == 3
    shown = opened.page.locator("#jobs ~ .scroll tbody th").all_inner_texts()
    assert HOSTILE[0] in shown
    assert any(r"\x1b[31m\ud800" in name for name in shown)
    assert any(r"\u202egnirts" in name for name in shown)
    box = opened.page.locator("#chart-memory").bounding_box()
    for part in (0.3, 0.6, 0.9):  # tooltips are HTML, too
        opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * part)
        opened.page.wait_for_timeout(60)
    assert opened.page.title() == "waterflow: 8 jobs on cpu"
    assert opened.page.locator("img").count() == 0
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.requests == [opened.url]
    assert opened.complaints == []
    opened.page.close()


def shown_range(opened):
    return opened.page.evaluate(
        "(() => { const range = Bokeh.documents[0].roots()[0].x_range;"
        " return [range.start, range.end]; })()"
    )


def focused(opened):
    return opened.page.evaluate(
        "(() => { const at = document.activeElement, style = getComputedStyle(at);"
        " return [at.dataset.move || at.id || at.getAttribute('href') || at.tagName,"
        " style.outlineStyle]; })()"
    )


def test_all_can_be_done_by_keyboard(browser, plain):
    opened = Opened(browser, plain, 1280)
    first, last = shown_range(opened)
    reached = []
    for _ in range(14):
        opened.page.keyboard.press("Tab")
        name, outline = focused(opened)
        assert outline != "none", name
        reached.append(name)
        if name == "in":
            opened.page.keyboard.press("Enter")
    assert reached[:6] == ["#memory", "#lanes", "#losses", "#alone", "#decisions", "#jobs"]
    order = [reached.index(name) for name in ("job", "in", "out", "left", "right", "all")]
    assert order == sorted(order)
    start, end = shown_range(opened)
    assert end - start == pytest.approx((last - first) / 2)
    opened.page.locator("button[data-move=all]").first.press("Enter")
    assert shown_range(opened) == [first, last]
    opened.page.close()


def test_a_job_is_highlighted_in_all_charts(browser, plain):
    opened = Opened(browser, plain, 1280)
    before = close_to(opened.pixels("#chart-memory"), PALETTE[0])
    opened.page.locator("#job").select_option("1")
    opened.page.wait_for_timeout(300)
    assert close_to(opened.pixels("#chart-memory"), PALETTE[0]) < before / 5
    assert close_to(opened.pixels("#chart-memory"), PALETTE[1]) > 500
    opened.page.close()


#: Of each tooltip shown, which is in a shadow tree: its text, and left, right, top, bottom.
TIPS = """() => { const found = [];
  const walk = node => {
    if (node.classList && node.classList.contains("bk-Tooltip") && node.offsetHeight) {
      const box = node.getBoundingClientRect();
      const told = [...node.shadowRoot.children].filter(part => part.tagName !== "STYLE");
      found.push([told.map(part => part.innerText).join(" "), box.left, box.right, box.top,
                  box.bottom]);
    }
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return found; }"""


@pytest.mark.parametrize("width", [1280, 390])
def test_hovering_tells_the_job_and_the_moment(browser, plain, width):
    opened = Opened(browser, plain, width)
    opened.page.locator("#chart-memory").scroll_into_view_if_needed()
    box = opened.page.locator("#chart-memory").bounding_box()
    assert opened.page.evaluate(TIPS) == []
    opened.page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 3)
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.8)
    opened.page.wait_for_function(f"({TIPS})().length == 2", timeout=60_000)
    job, moment = sorted(opened.page.evaluate(TIPS), key=lambda tip: len(tip[0]))
    assert "first" in job[0]
    for told in ("second", "together", "2.0 MiB", "third 1.0 MiB", "first 341.3 KiB"):
        assert told in moment[0]
    for _, left, right, _, _ in (job, moment):
        assert 0 <= left < right <= width
    assert job[3] >= moment[4] or job[2] <= moment[1] or job[1] >= moment[2]  # side by side
    assert opened.complaints == []
    opened.page.close()


def test_a_small_use_of_a_large_budget_is_seen(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report_page(make_report(["only", "two"], budget=2**36)), "utf-8")
    opened = Opened(browser, path, 1280)
    before = close_to(opened.pixels("#chart-memory"), PALETTE[0])
    assert before > 5_000
    opened.page.locator("#tall").press("Enter")
    opened.page.wait_for_timeout(300)
    assert close_to(opened.pixels("#chart-memory"), PALETTE[0]) < before / 10
    opened.page.close()


def test_the_page_is_complete_without_its_charts():
    page = report_page(make_report(["first", "second", "third"]))
    for told in ("What failed", "opaque because of first", "works in 40%", "no second", "3.0 MiB"):
        assert told in page
    assert page.count("<h1") == 1
    assert page.count('<th scope="col"') > 20


@pytest.mark.parametrize("report", [Report(), make_report(["a", "b"], steps=0)], ids=["0", "2"])
def test_reports_of_nothing_have_a_page(report):
    assert "</html>" in report_page(report)


def test_metrics_are_drawn():
    report = make_report(["a", "b"])
    report["a"].metrics = {"accuracy": [0.1, 0.5, float("nan"), 0.9]}
    report["b"].metrics = {"accuracy": [(10, 0.4), (20, 0.6)], "<b>f1": [0.5]}
    page = report_page(report)
    assert 'aria-label="accuracy of each job"' in page
    assert "<h3><bdi>&lt;b&gt;f1</bdi></h3>" in page
    assert "<td >3</td><td >0.1</td><td >0.1</td><td >0.9</td><td >0.9</td>" in page


def test_evaluations_are_drawn_at_their_steps():
    report = make_report(["a", "b"], steps=0)
    report["a"].evaluations = [
        Evaluation(10, {"accuracy": 0.25}),
        Evaluation(20, {"accuracy": 0.75, "</script>": 1.0}),
    ]
    page = report_page(report)
    assert "No step has told a loss." in page
    assert 'aria-label="evaluation: accuracy of each job"' in page
    assert "evaluation: &lt;/script&gt;" in page
    assert page.count("</script>") == 3
    assert "<td >2</td><td >0.25</td><td >0.25</td><td >0.75</td><td >0.75</td>" in page


def test_decisions_are_told_by_kind():
    report = make_report(["a", "b"])
    report.decisions = [
        Decision(0.1, "a", "rests, its memory is the others'", "waited"),
        Decision(0.2, "a", "goes on", "waited"),
        Decision(0.3, "b", "works in 40% of 'a''s time (+5.0% of its time alone)", "throttled"),
        Decision(0.4, "", "the budget is 8.0 MiB"),
        Decision(0.5, "b", "its steps copy 2.0 MiB to memory and back, within 3.0 MiB", "spilled"),
    ]
    report["b"].spills = [Spill(0.5, 3 * MIB, 2 * MIB, MIB // 2, "disk")]
    report["b"].memory_speeds = [(3 * MIB, 12.5), (4 * MIB, 20.0)]
    page = report_page(report)
    section = page[page.index('id="decisions"') : page.index('id="jobs"')]
    tables = dict(
        re.findall(r"<caption><span>(.*?)</span></caption>.*?<tbody>(.*?)</tbody>", section)
    )
    assert [name.split(",")[0] for name in tables] == [
        "Who waited",
        "Who was throttled",
        "What spilled",
        "Limits that were tried for memory that jobs share",
        "Limits",
        "How steps ran",
    ]
    waited, throttled, spilled, tried, other, ran = tables.values()
    assert "goes on" in waited
    assert waited.count("<tr>") == 2
    assert "works in 40%" in throttled
    assert throttled.count("<tr>") == 1
    assert all(told in spilled for told in ("3.0 MiB", "2.0 MiB", "512.0 KiB", "disk"))
    assert "12.5" in tried
    assert tried.count("<tr>") == 2
    assert "the budget is" in other
    assert other.count("<tr>") == 1
    assert "opaque because of a" in ran


def test_many_jobs_and_steps_stay_usable():
    names = [f"job {number}" for number in range(200)]
    report = make_report(names, steps=20_000)
    began = time.process_time()
    page = report_page(report)
    assert time.process_time() - began < 60  # 4 s where nothing else runs
    assert len(page) < 12 * MIB
    assert "numbers are shown: of each interval of steps the lowest and the highest" in page
