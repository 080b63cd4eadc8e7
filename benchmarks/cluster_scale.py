"""How long simulations take as traces grow, and how much memory.

    python -m benchmarks.cluster_scale --json
    WATERFLOW_TRACES=FOLDER python -m benchmarks.cluster_scale --policies fifo,tiresias

Jobs are the first of Microsoft's ITP trace, all clusters as one of 1,280 GPUs, where the folder
WATERFLOW_TRACES has `itp/raw-traces.tar.gz` (microsoft/elasticflow-traces); else as many that are
drawn like them. Each run is a process of its own; `seconds` are of CPU
time, on one core, and `peak_bytes` is all of it, Python included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

COUNTS = (1_000, 10_000, 69_351)
NODES = 160
POLICIES = "fifo,srtf,tiresias,gittins,elastic-tiresias,antman,gandiva,waterflow"
_GAP = 74.7  # seconds between two submissions, on average, in the trace
_SIZES = ((1, 70), (2, 8), (4, 9), (8, 9), (16, 2), (32, 1), (64, 1))


def trace(count: int) -> list[Any]:
    from dataclasses import replace

    from waterflow.cluster import read_trace

    archive = Path(os.environ.get("WATERFLOW_TRACES", "")) / "itp" / "raw-traces.tar.gz"
    if "WATERFLOW_TRACES" not in os.environ or not archive.exists():
        return drawn(count)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        text = ["job_id,submission_time,duration,num_gpu"]
        for path in sorted(Path(folder).glob("*.csv")):
            text += path.read_text().splitlines()[1:]
        everything = Path(folder) / "all.csv"
        everything.write_text("\n".join(text))
        jobs = read_trace(everything)[:count]
    return [replace(job, index=index) for index, job in enumerate(jobs)]


def drawn(count: int) -> list[Any]:
    """Jobs of random lengths and sizes, from a fixed seed."""
    from waterflow.cluster import JobSpec

    draw, now, jobs = random.Random(1), 0.0, []
    sizes, weights = zip(*_SIZES, strict=True)
    for index in range(count):
        now += draw.expovariate(1 / _GAP)
        seconds = min(draw.lognormvariate(7.5, 2.2), 2e6)
        (gpus,) = draw.choices(sizes, weights)
        jobs.append(JobSpec(index, f"j{index}", now, gpus, seconds))
    return jobs


def measure(count: int, policy: str) -> dict[str, Any]:
    """In a process of its own."""
    from waterflow.cluster import ClusterSpec, simulate

    jobs = trace(count)
    begin = time.process_time()
    found = simulate(jobs, ClusterSpec.of(NODES, 8), policy)
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "jobs": len(found.completion_times),
        "policy": policy,
        "seconds": round(seconds, 3),
        "events": found.events,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--policies", default=POLICIES, help="names, with commas")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="jobs, with commas")
    options = parser.parse_args()
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for policy in options.policies.split(","):
        for count in options.counts.split(","):
            with spawn.Pool(1) as pool:
                row = pool.apply(measure, (int(count), policy))
            rows.append(row)
            if not options.json:
                each = 1e6 * row["seconds"] / row["events"]
                print(
                    f"{policy:18} {row['jobs']:7,} jobs {row['events']:8,} events "
                    f"{row['seconds']:8.2f} s {each:6.1f} us/event "
                    f"{row['peak_bytes'] / 2**20:7.0f} MiB",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
