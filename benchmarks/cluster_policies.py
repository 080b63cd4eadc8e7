"""Traces times policies, the published number beside ours where there is one.

    python -m benchmarks.cluster_policies --json
    WATERFLOW_TRACES=FOLDER python -m benchmarks.cluster_policies     # more traces

Rows whose trace ends in "/tiresias" or "/muri" do as the simulators of Tiresias and Muri did, with
their artefacts; the published numbers are theirs. All others are our own settings: measured speeds,
and the costs of moves that papers report.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "cluster" / "data"
TIRESIAS = {
    "fifo": (1556.483, 5747.0),
    "fjf": (715.267, 4806.0),
    "sjf": (725.700, 4806.0),
    "lpjf": (1455.750, 5650.0),
    "srtf": (519.867, 4901.0),
    "srsf": (563.383, 4962.0),
    "las": (715.267, 4806.0),
    "tiresias": (715.267, 4806.0),
}
MURI: dict[str, dict[str, tuple[float, float | None]]] = {
    "trace1": {
        "srtf": (1370603.198, 26045465.5),
        "srsf": (980140.570, None),
        "tiresias": (3330371.307, 23556410.2),
    },
    "trace3": {
        "srtf": (193081.796, 8174135.3),
        "srsf": (185021.880, None),
        "tiresias": (347213.248, 8174226.3),
        "antman": (305453.941, None),
    },
}
_DYNAMIC = "120_0.2_5_100_40_25_0,0.5,0.5_0.6,0.3,0.09,0.01_multigpu_dynamic.trace"
#: Where policies of others shine: sharing (Muri's), elastic sizes (ElasticFlow's), short jobs.
MORE = (
    ("trace4", "muri/simulator/trace-data/trace4.csv", (8, 8)),
    ("philly 103959", "elasticflow/philly_103959.csv", (8, 8)),
    ("shockwave 120", f"shockwave/{_DYNAMIC}", (4, 8)),
)
BLIND = ("fifo", "srtf", "srsf", "tiresias", "gittins", "elastic-tiresias")
OWN = [*BLIND, "antman", "gandiva", "waterflow"]


def rows(own: list[str]) -> Iterator[dict[str, Any]]:
    small = DATA / "tiresias_60_jobs.csv"
    for policy, (jct, makespan) in TIRESIAS.items():
        yield row("60 jobs/tiresias", small, (2, 4), policy, "tiresias", jct, makespan)
    for name, known in MURI.items():
        path = muri(name)
        for policy, (jct, span) in known.items() if path.exists() else ():
            yield row(f"{name}/muri", path, (8, 8), policy, "muri", jct, span)
    for policy in own:
        yield row("60 jobs", small, (2, 4), policy)
    for policy in own:
        yield row("trace3", muri("trace3"), (8, 8), policy)
    for name, path, machines in MORE:
        for policy in own if (public() / path).exists() else ():
            yield row(name, public() / path, machines, policy)


def public() -> Path:
    """The folder of large traces; rows of those that are not there are left out."""
    return Path(os.environ.get("WATERFLOW_TRACES", "no folder"))


def muri(name: str) -> Path:
    if name == "trace3":
        return DATA / "muri_trace3.csv"
    return public() / "muri" / "simulator" / "trace-data" / f"{name}.csv"


def row(
    trace: str,
    path: Path,
    machines: tuple[int, int],
    policy: str,
    compat: str = "",
    published_jct: float | None = None,
    published_makespan: float | None = None,
) -> dict[str, Any]:
    from waterflow.cluster import ClusterSpec, simulate
    from waterflow.cluster.simulator.costs import FREE, MEASURED

    costs = FREE if compat else MEASURED
    found = simulate(path, ClusterSpec.of(*machines), policy, compat=compat, costs=costs)
    return {
        "trace": trace,
        "policy": policy,
        "average_jct": found.average_jct,
        "makespan": found.makespan,
        "published_jct": published_jct,
        "published_makespan": published_makespan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--policies", default=",".join(OWN), help="for our own settings")
    options = parser.parse_args()
    found = []
    for one in rows(options.policies.split(",")):
        found.append(one)
        if not options.json:
            known = f"{one['published_jct']:16,.3f}" if one["published_jct"] else ""
            print(
                f"{one['trace']:18} {one['policy']:18} {one['average_jct']:16,.3f} "
                f"{one['makespan']:16,.1f} {known}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
