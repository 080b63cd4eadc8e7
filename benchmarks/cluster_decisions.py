"""How long one decision takes: 5,000 GPUs and 2,000 jobs, for each policy.

    python -m benchmarks.cluster_decisions --json

Three moments: "half waits" (1,000 jobs run on 4,500 GPUs), "nobody waits" (all 2,000 run, 1,300
GPUs are idle), "full" (every GPU is in use, a third of the jobs is opportunistic, quotas of two
tenants). Milliseconds of CPU time: the first decision, and the median of five.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

NODES, GPUS_EACH, JOBS = 625, 8, 2000
MOMENTS = ("half waits", "nobody waits", "full")


def state(policy: Any, moment: str) -> Any:
    from waterflow.cluster import ClusterSpec
    from waterflow.cluster.simulator.measured import Measured
    from waterflow.cluster.spec import GIB
    from waterflow.cluster.store import StateStore

    full = moment == "full"
    cluster = ClusterSpec.of(NODES, GPUS_EACH, quotas={"a": 3000, "b": 2000} if full else None)
    store = StateStore(cluster, Measured())
    store.now, store.turn = 50.0, 1
    draw, gpu = random.Random(1), 0
    limit = cluster.gpus if full else 4500
    for index in range(JOBS):
        size = draw.choice([1, 1, 1, 2, 4] if moment == "nobody waits" else [1, 1, 1, 2, 4, 8])
        spec = _spec(draw, index, size, full, 8 * GIB)
        runs = gpu + size <= limit and (index % 2 or moment != "half waits")
        store.put(_job(policy, spec, tuple(range(gpu, gpu + size)) if runs else ()))
        gpu += size if runs else 0
    return store


def _spec(draw: random.Random, index: int, size: int, classes: bool, memory: int) -> Any:
    from waterflow.cluster import JobSpec

    return JobSpec(
        index,
        f"j{index}",
        0.0,
        size,
        draw.uniform(100, 1e5),
        model="vgg16",
        tenant="ab"[index % 2],
        guaranteed=not classes or index % 3 > 0,
        memory=memory,
        utilization=draw.choice([0.3, 0.6, 0.9, 1.0]),
    )


def _job(policy: Any, spec: Any, gpus: tuple[int, ...]) -> Any:
    from dataclasses import replace

    from waterflow.cluster.state import JobState

    job = JobState(
        spec,
        gpus,
        left=spec.steps,
        step_time=spec.step_seconds if gpus else float("inf"),
        opportunistic=not spec.guaranteed,
        first_start=0.0 if gpus else float("nan"),
    )
    return replace(job, level=policy.level(job), rank=policy.rank(job, 0.0, 0))


def measure(name: str, moment: str) -> dict[str, Any]:
    from waterflow.cluster import make_policy

    policy = make_policy(name)
    there = state(policy, moment)
    times = []
    for _ in range(6):
        begin = time.thread_time()
        policy.decide(there)
        times.append(1e3 * (time.thread_time() - begin))
    return {
        "policy": name,
        "moment": moment,
        "waiting": there.waiting,
        "first_ms": round(times[0], 2),
        "median_ms": round(statistics.median(times[1:]), 2),
    }


def main() -> None:
    from waterflow.cluster import POLICIES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    options = parser.parse_args()
    rows = []
    for name in POLICIES:
        for moment in MOMENTS:
            rows.append(measure(name, moment))
            if not options.json:
                one = rows[-1]
                print(
                    f"{name:18} {moment:13} {one['waiting']:5} wait {one['first_ms']:8.2f} ms "
                    f"first {one['median_ms']:8.2f} ms"
                )
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
