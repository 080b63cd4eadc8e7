"""How long planning takes as steps grow: Tacotron 2 with more and more frames.

    python -m benchmarks.planner_scale --json

Each size is captured once (its time is told apart) and planned in a process of its own on one
core: two equal jobs under half again as much memory as one needs, node groups, schedule, addresses.
`peak_rss_bytes` is all of that process, Python and torch included; `extent_ratio` is the extent of
the addresses over the live peak, less what is held all the time; it is left out where a policy does
not fit. `growth` compares the time per node at the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, show

#: Frames of speech: a step of about 5,000, of 20,000 and of 80,000 nodes.
FRAMES = (21, 106, 445)
BATCH = 8


def capture(frames: int, path: Path) -> float:
    from waterflow.models.tacotron2 import tacotron2_task
    from waterflow.study.footprint import forecast
    from waterflow.study.job_specs import job_of

    task = tacotron2_task(frames)
    started = time.perf_counter()
    footprint = forecast(lambda: job_of(task, BATCH))
    seconds = time.perf_counter() - started
    path.write_bytes(pickle.dumps(footprint))
    return seconds


def plan_one(path: Path) -> dict[str, Any]:
    """In a process of its own."""
    import torch

    from waterflow.study.estimate import SizedJob, estimate
    from waterflow.study.hardware import get_hardware

    torch.set_num_threads(1)
    device = get_hardware("v100")
    footprint = pickle.loads(path.read_bytes())
    times = device.seconds(footprint.flops, footprint.moved_bytes)
    footprint = replace(footprint, steady=replace(footprint.steady, node_seconds=times))
    started = time.perf_counter()
    sized_job = SizedJob(footprint, device.alignment)
    needed = sized_job.solo_bytes
    result: dict[str, Any] = {
        "nodes": footprint.steady.num_nodes,
        "events": len(footprint.steady.events),
        "solo_seconds": time.perf_counter() - started,
        "solo_extent_ratio": sized_job.steady.extent / sized_job.profile.transient_peak_bytes,
    }
    memory = 2 * sized_job.persistent_bytes + int(1.5 * (needed - sized_job.persistent_bytes))
    for policy in ("temporal", "waterwave-s", "waterwave", "flow"):
        started = time.perf_counter()
        found = estimate([sized_job, sized_job], memory, policy, device.alignment)
        result[f"{policy}_seconds"] = time.perf_counter() - started
        if found is not None and policy != "flow":
            held = 2 * sized_job.persistent_bytes
            result[f"{policy}_extent_ratio"] = (found.extent_bytes - held) / (
                found.peak_bytes - held
            )
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--plan":
        print(json.dumps(plan_one(Path(sys.argv[2]))))
        return
    options = arguments(__doc__ or "", repeats=1)
    sizes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for frames in FRAMES:
            path = Path(folder) / f"{frames}.pickle"
            seconds = capture(frames, path)
            command = [sys.executable, "-m", "benchmarks.planner_scale", "--plan", str(path)]
            one_core = {"OMP_NUM_THREADS": "1", **os.environ}
            process = subprocess.run(command, check=True, capture_output=True, env=one_core)
            found = {"frames": frames, "capture_seconds": seconds, **json.loads(process.stdout)}
            sizes.append(found)
            print(json.dumps(found), file=sys.stderr)
    before, large = sizes[-2:]  # the small one is not always given a plan by every policy
    growth = {
        f"{policy}_growth": (large[f"{policy}_seconds"] / before[f"{policy}_seconds"])
        / (large["nodes"] / before["nodes"])
        for policy in ("waterwave", "flow")
    }
    show({"sizes": sizes, **growth}, options.json)


if __name__ == "__main__":
    main()
