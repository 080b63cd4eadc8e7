import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from waterflow.partitioner.testing import step_profile
from waterflow.study import view
from waterflow.study.estimate import SizedJob, estimate
from waterflow.study.footprint import Footprint
from waterflow.study.results import CoTrained, MaxBatch, Pair, Plan, PlannedJob

pytestmark = pytest.mark.virtual

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def sized(name):
    steady = step_profile([[64], [64], [-64], [-64]], seconds=[1.0] * 4, name=name)
    zeros = np.zeros(4, dtype=np.int64)
    footprint = Footprint(
        name=name,
        first=None,
        steady=steady,
        persistent_bytes=64,
        boundary=2,
        flops=zeros,
        moved_bytes=zeros,
    )
    return SizedJob(footprint, 64)


SUBJECTS = (sized("a"), sized("[b]"))
ESTIMATE = estimate(SUBJECTS, 1024, "flow", 64)


def plan_of(policies, memory=1024):
    jobs = (PlannedJob("a", 8, 64, 192, "fake"), PlannedJob("[b]", None, 64, 192, "measured"))
    return Plan(memory, "v100", jobs, policies, SUBJECTS)


def printed(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def words(table):
    return " ".join(printed(table).split())


def test_a_plan_as_a_table():
    text = words(view.plan_table(plan_of({"flow": ESTIMATE, "waterwave": None})))
    assert "2 jobs fit 1.0 KiB" in text
    assert "does not fit" in text
    assert "a, batch 8: 64 B all the time, 192 B alone (fake profile)" in text
    assert "[b]: 64 B" in text  # rich reads it as markup where it may
    assert "simulated, from times estimated for v100" in text
    assert "do not fit" in printed(view.plan_table(plan_of({"flow": None})))


def test_a_plan_says_who_goes_first():
    jobs = (
        PlannedJob("a", 8, 64, 192, "fake", "guaranteed"),
        PlannedJob("[b]", None, 64, 192, "fake", "opportunistic", 2.0),
    )
    flow = estimate(SUBJECTS, 1024, "flow", 64)
    text = words(view.plan_table(Plan(1024, "cpu", jobs, {"flow": flow}, SUBJECTS)))
    assert "a (guaranteed, weight 1) 100%, [b] (opportunistic, weight 2) 100%" in text
    none = Plan(300, "cpu", jobs, {"flow": None}, SUBJECTS, ("a",), ("[b]",), ("c",))
    text = words(view.plan_table(none))
    assert "lets in first: a then, as room becomes free: [b]" in text
    assert "too large even alone: c" in text


def test_the_largest_batches_as_a_table():
    together = CoTrained((6, 3), 0.75, ESTIMATE)
    found = MaxBatch(1024, "cpu", ("a", "b"), (8, 4), {"flow": together, "waterwave": None})
    rows = printed(view.max_batch_table(found)).splitlines()
    assert any(row.split()[:4] == ["alone", "8", "4", "100.0%"] for row in rows)
    assert any(row.split()[:4] == ["flow", "6", "3", "75.0%"] for row in rows)
    assert any("waterwave" in row and "does not fit" in row for row in rows)


def test_pairs_as_a_table():
    text = printed(view.pair_table([Pair(("a", "[b]"), (0, 1), (8, None), 1.25, ESTIMATE)]))
    assert "a + [b]" in text
    assert "8 + as given" in text
    assert "1.25x" in text


@pytest.mark.parametrize("kind", SIGNATURES)
def test_pictures(kind):
    drawn = [
        view.draw_plan(plan_of({"flow": ESTIMATE, "waterwave": None}), kind),
        view.draw_plan(plan_of({"flow": None}, memory=64), kind),
        view.draw_frontier(
            MaxBatch(1024, "cpu", ("a",), (8,), {}, {"flow": [(0.5, 1.0), (1.0, 0.2)], "x": []}),
            kind,
        ),
    ]
    assert all(picture.startswith(SIGNATURES[kind]) for picture in drawn)
    assert len(set(drawn)) == 3


def test_any_name_can_be_in_a_title_or_a_legend(recwarn):
    names = ("$a_b$", "\u6a21 \U0001f680", "_x")
    view.draw_frontier(MaxBatch(1024, "cpu", names, (8,), {}, {"flow": [(0.5, 1.0)]}), "png")
    rows = [{"model": name, "limit_ratio": 1.0, "speed_ratio": 1.0} for name in names]
    view.draw_speed_by_limit(rows)
    assert not list(recwarn)


def speed_rows():
    return [
        {"model": "resnet", "limit_ratio": 0.6, "speed_ratio": 0.9},
        {"model": "resnet", "limit_ratio": 1.0, "speed_ratio": 1.0},
        {"model": "espcn", "limit_ratio": 1.0, "speed_ratio": 0.99},
        {"model": "espcn", "limit_ratio": 0.6, "smallest_bytes": 59334784},
    ]


def test_speeds_under_limits_have_a_line_per_job():
    axes = Figure().add_subplot()
    view._speed_lines(axes, speed_rows())
    resnet, espcn, cross = axes.get_lines()
    assert resnet.get_label() == "resnet"
    assert resnet.get_xydata().tolist() == [[0.6, 0.9], [1.0, 1.0]]
    assert espcn.get_xydata().tolist() == [[1.0, 0.99]]
    assert cross.get_xydata().tolist() == [[0.6, 0.0]]
    assert cross.get_color() == espcn.get_color()


@pytest.mark.parametrize("rows", [speed_rows(), speed_rows()[3:], []])
def test_speeds_under_limits_are_drawn(rows):
    picture = imread(io.BytesIO(view.draw_speed_by_limit(rows)))
    assert picture.std() > 0
    assert picture.shape == (500, 800, 4)
