"""What a first capture takes in a new process: traced, or read from disk.

    python -m benchmarks.capture --json
    python -m benchmarks.capture --models bert --repeats 7

CPU seconds of the thread that captures a job's first and later steps, the account of its Python
state included: in processes that take turns, one with nothing on disk (`cold_seconds`), one with
profiles alone (`fresh_seconds`), one with captures, too (`disk_seconds`). `fresh_vs_disk` above 1
means that reading is faster; null where the step is not kept, since tracing it is as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import waterflow as wf
from benchmarks.common import interleaved, median_ratio, show


def mlp() -> wf.Job:
    from torch.nn import functional

    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)]
    model = torch.nn.Sequential(*layers)
    return wf.Job(
        "mlp",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        data=[(torch.randn(32, 64), torch.randint(10, (32,)))],
    )


def bert() -> wf.Job:
    from waterflow.models.bert import Bert, BertConfig, masked_language_loss, masked_text

    sizes = {"width": 128, "layers": 2, "heads": 2, "inner": 512, "positions": 64}
    model = Bert(BertConfig(vocabulary=1000, **sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = [masked_text(2, 32, 1000)]
    return wf.Job("bert", model=model, optimizer=optimizer, loss=masked_language_loss, data=data)


def resnet50() -> wf.Job:
    from waterflow.models.zoo import TASKS
    from waterflow.study.job_specs import job_of

    return job_of(TASKS["resnet50"], 2, "resnet50")


MODELS: dict[str, Callable[[], wf.Job]] = {made.__name__: made for made in (mlp, bert, resnet50)}


def capture(name: str) -> dict[str, object]:
    """Trains a few steps in this process; what captures have taken, and how many were traced."""
    from waterflow.steps import step_builder

    seconds, traces = 0.0, 0
    build, trace = step_builder.StepBuilder.build, step_builder.trace_forward

    def timed(*arguments: object) -> object:
        nonlocal seconds
        began = time.thread_time()
        try:
            return build(*arguments)  # type: ignore[arg-type]
        finally:
            seconds += time.thread_time() - began

    def counted(*arguments: object) -> object:
        nonlocal traces
        traces += 1
        return trace(*arguments)  # type: ignore[arg-type]

    step_builder.StepBuilder.build = timed  # type: ignore[assignment,method-assign]
    step_builder.trace_forward = counted  # type: ignore[assignment]
    try:
        torch.manual_seed(0)
        job = MODELS[name]()
        job.data, job.steps, job.capture = list(job.data) * 3, 3, True
        wf.run([job], memory="8GiB", lanes=1, threads=1).raise_errors()
    finally:
        step_builder.StepBuilder.build = build  # type: ignore[method-assign]
        step_builder.trace_forward = trace
    return {"seconds": seconds, "traces": traces}


def captured(name: str, folder: Path) -> dict[str, float]:
    """The same in a new process with this cache."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.capture", "--one", name],
        env={**os.environ, "WATERFLOW_CACHE": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(name: str, repeats: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        captured(name, made)
        is_kept = (made / "captures").is_dir()

        def with_cache(kept: tuple[str, ...]) -> Callable[[], float]:
            def run() -> float:
                with tempfile.TemporaryDirectory() as other:
                    cache = Path(other) / "cache"
                    cache.mkdir(mode=0o700)
                    for part in kept:
                        if (made / part).is_dir():
                            shutil.copytree(made / part, cache / part)
                    return captured(name, cache)["seconds"]

            return run

        found = interleaved(
            {
                "cold": with_cache(()),
                "fresh": with_cache(("profiles",)),
                "disk": with_cache(("profiles", "captures")),
            },
            repeats,
        )
        size = sum(file.stat().st_size for file in (made / "captures").glob("*"))
        traces = captured(name, made)["traces"]
    return {
        "model": name,
        **{f"{way}_seconds": round(statistics.median(all_), 3) for way, all_ in found.items()},
        "fresh_vs_disk": round(median_ratio(found["fresh"], found["disk"]), 2) if is_kept else None,
        "cold_vs_disk": round(median_ratio(found["cold"], found["disk"]), 2),
        "kept_bytes": size,
        "traced": traces,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3, help="interleaved runs of each")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(capture(options.one)))
        return
    rows = []
    for name in options.models:
        rows.append(measure(name, options.repeats))
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        show({"rows": rows}, as_json=True)


if __name__ == "__main__":
    main()
