import json

import pytest

from waterflow.study.estimate import PolicyEstimate
from waterflow.study.results import CoTrained, MaxBatch, Pair, Plan, PlannedJob

pytestmark = pytest.mark.virtual

ESTIMATE = PolicyEstimate(
    policy="flow",
    peak_bytes=700,
    extent_bytes=800,
    seconds=2.0,
    serial_seconds=3.0,
    overlap=0.5,
    syncs_per_step=4.0,
    speeds=(0.75,),
)
SUMMARY = {
    "peak_bytes": 700,
    "syncs_per_step": 4.0,
    "overlap": 0.5,
    "seconds": 2.0,
    "speedup": 1.5,
}


def test_a_plan_fits_where_any_policy_does():
    jobs = (PlannedJob("a", 8, 100, 300, "fake"),)
    found = Plan(1000, "v100", jobs, {"flow": ESTIMATE, "waterwave": None})
    assert found.fits
    document = json.loads(found.to_json())
    assert document["policies"] == {"flow": {**SUMMARY, "speeds": [0.75]}, "waterwave": None}
    (job,) = document["jobs"]
    assert job == {
        "name": "a",
        "batch": 8,
        "persistent_bytes": 100,
        "solo_bytes": 300,
        "source": "fake",
        "priority": "normal",
        "weight": 1.0,
    }
    assert (document["first"], document["waiting"], document["refused"]) == ([], [], [])
    assert not Plan(1000, "v100", jobs, {"flow": None}).fits


def test_the_largest_batches_name_what_does_not_fit():
    together = CoTrained((6, 3), 0.75, ESTIMATE)
    found = MaxBatch(1000, "cpu", ("a", "b"), (8, 4), {"flow": together, "waterwave": None})
    document = json.loads(found.to_json())
    assert document["jobs"] == [{"name": "a", "solo": 8}, {"name": "b", "solo": 4}]
    assert document["policies"]["flow"] == {"batch": [6, 3], "ratio": 0.75, **SUMMARY}
    assert document["policies"]["waterwave"] is None
    assert "frontier" not in document
    drawn = MaxBatch(1000, "cpu", ("a",), (8,), {}, {"flow": [(0.5, 1.0)]})
    assert drawn.to_dict()["frontier"] == {"flow": [(0.5, 1.0)]}


def test_a_pair_says_what_is_simulated():
    found = Pair(("a", "b"), (0, 2), (8, None), 1.25, ESTIMATE).to_dict()
    assert found["batch"] == [8, None]
    assert found["places"] == [0, 2]
    assert {"speed", "seconds"} <= set(found["simulated"]) <= set(found)
    assert "peak_bytes" not in found["simulated"]
