"""Elastic-Tiresias against Tiresias by class of jobs, as in Amoeba's Table 2.

    WATERFLOW_TRACES=FOLDER python -m benchmarks.cluster_elastic --traces c03,c04,c07,philly --json

The paper says neither the cluster's size nor N, so both are swept. Both policies have the paper's
quanta of 10,000 and 200,000 GPU seconds. `change` is of the average completion time, by class; rows
whose `costs` are "stop-resume" charge 30 s for every change of size and every resumption, to both.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

#: GPUs and values of N.
SWEEP: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "c03": ((128, 160, 224), (10, 100)),
    "c04": ((544,), (10, 100, 300)),
    "c07": ((288,), (10, 100, 300)),
    "philly": ((384,), (200, 300)),
}


def jobs(trace: str) -> Any:
    from waterflow.cluster import read_trace

    folder = Path(os.environ["WATERFLOW_TRACES"])
    if trace == "philly":
        return read_trace(folder / "philly-pollux" / "philly.csv")
    archive = folder / "itp" / "elasticflow-traces.tar.gz"
    with tempfile.TemporaryDirectory() as here, tarfile.open(archive) as tar:
        tar.extractall(here, filter="data")
        (path,) = Path(here).rglob(f"cluster{trace[1:]}.csv")
        return read_trace(path)


def rows(trace: str, stop_resume: bool) -> list[dict[str, Any]]:
    from waterflow.cluster import ClusterSpec, simulate
    from waterflow.cluster.policies.elastic_tiresias import LIMITS, ElasticTiresias
    from waterflow.cluster.policies.tiresias import Tiresias
    from waterflow.cluster.report.classes import average_by_size
    from waterflow.cluster.simulator.costs import COSTS

    found, specs = [], jobs(trace)
    sizes, most = SWEEP[trace]
    for gpus in sizes:
        cluster = ClusterSpec.of(gpus // 8, 8)
        for costs in ("measured", "stop-resume") if stop_resume else ("measured",):
            plain = average_by_size(simulate(specs, cluster, Tiresias(LIMITS), costs=COSTS[costs]))
            for n in most:
                policy = ElasticTiresias(most_waiting=n)
                elastic = simulate(specs, cluster, policy, costs=COSTS[costs])
                times = average_by_size(elastic)
                found.append({
                    "trace": trace,
                    "gpus": gpus,
                    "most_waiting": n,
                    "costs": costs,
                    "tiresias": {kind: round(plain[kind][1]) for kind in plain},
                    "change": {k: round(times[k][1] / plain[k][1] - 1, 4) for k in plain},
                    "resizes_per_job": round(float(elastic.resizes.sum()) / len(specs), 2),
                })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--traces", default="c03,c04,c07", help=f"of {', '.join(SWEEP)}")
    parser.add_argument("--no-stop-resume", action="store_true", help="leave these rows out")
    options = parser.parse_args()
    found = []
    for trace in options.traces.split(","):
        for row in rows(trace, not options.no_stop_resume):
            found.append(row)
            if not options.json:
                print(json.dumps(row), flush=True)
    if options.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
