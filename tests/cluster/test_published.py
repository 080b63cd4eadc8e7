"""The simulator against figures that the simulators of Tiresias and Muri print."""

import pytest

from tests.support.clusters import DATA, public_trace
from waterflow.cluster import ClusterSpec, simulate

pytestmark = pytest.mark.virtual

TIRESIAS = {  # average JCT in s, makespan in s, preemptions
    "fifo": (1556.483, 5747, 0),
    "fjf": (715.267, 4806, 0),
    "sjf": (725.700, 4806, 8),
    "lpjf": (1455.750, 5650, 0),
    "srtf": (519.867, 4901, 7),
    "srsf": (563.383, 4962, 13),
    "las": (715.267, 4806, 0),
    "tiresias": (715.267, 4806, 0),
}
MURI = {  # average JCT in s, makespan in s where it is known
    ("trace1", "srtf"): (1370603.198, 26045465.5),
    ("trace1", "srsf"): (980140.570, None),
    ("trace1", "tiresias"): (3330371.307, 23556410.2),
    ("trace3", "srtf"): (193081.796, 8174135.3),
    ("trace3", "srsf"): (185021.880, None),
    ("trace3", "tiresias"): (347213.248, 8174226.3),
    ("trace3", "antman"): (305453.941, None),
}
#: Without the start overhead that Muri's simulator takes at every event; trace 3.
MURI_WITHOUT_OVERHEAD = {"srtf": 190377.377, "srsf": 183965.978, "tiresias": 340306.277}


@pytest.mark.parametrize("policy", TIRESIAS)
def test_tiresias_60_jobs_on_two_nodes(policy):
    cluster = ClusterSpec.of(2, 4)
    found = simulate(DATA / "tiresias_60_jobs.csv", cluster, policy, compat="tiresias")
    jct, makespan, preemptions = TIRESIAS[policy]
    assert found.average_jct == pytest.approx(jct, abs=5e-4)
    assert found.makespan == makespan
    assert found.preemptions.sum() == preemptions


@pytest.mark.parametrize(("trace", "policy"), MURI)
def test_muri_on_64_gpus(trace, policy):
    path = DATA / "muri_trace3.csv"
    if trace != "trace3":
        path = public_trace(f"muri/simulator/trace-data/{trace}.csv")
    found = simulate(path, ClusterSpec.of(8, 8), policy, compat="muri")
    jct, makespan = MURI[trace, policy]
    assert found.average_jct == pytest.approx(jct, abs=1e-3)
    if makespan is not None:
        assert found.makespan == pytest.approx(makespan, abs=0.05)


@pytest.mark.parametrize("policy", MURI_WITHOUT_OVERHEAD)
def test_muri_without_the_overhead_at_every_event(policy):
    from waterflow.cluster.policies import make_policy
    from waterflow.cluster.run import as_muri
    from waterflow.cluster.simulator.speeds import Plain
    from waterflow.cluster.traces import read_trace

    jobs = as_muri(read_trace(DATA / "muri_trace3.csv"))
    found = simulate(jobs, ClusterSpec.of(8, 8), make_policy(policy, "muri"), speeds=Plain())
    assert found.average_jct == pytest.approx(MURI_WITHOUT_OVERHEAD[policy], abs=1e-3)
