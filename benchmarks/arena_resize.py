"""The budget made smaller and larger by a gigabyte while a job trains: who has the bytes when.

    python -m benchmarks.arena_resize --json

Before each shrink a step touches the gigabyte, so that it is the system's to give back; whether it
has it then is looked up. Part of `benchmarks.elastic_memory`.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import waterflow as wf
from benchmarks.common import arguments, show
from waterflow.models.zoo import TASKS
from waterflow.study.job_specs import job_of

GIB = 1 << 30
SMALL = 256 << 20


def resident_bytes() -> int:
    """What the system has given to this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def toucher() -> wf.Job:
    """A job whose steps touch a gigabyte; an opportunistic one, which rests when that goes."""
    model = torch.nn.Linear(8, 8)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum() + torch.ones(GIB // 4)[::4096].mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return wf.Job(
        "toucher",
        model=model,
        optimizer=optimizer,
        loss=loss,
        data=[torch.randn(4, 8)],
        epochs=10**6,
        capture=True,
        audit="off",
        priority="opportunistic",
    )


def wait_for_steps(handle: wf.JobHandle, count: int) -> float:
    """Seconds until the job has made so many steps more."""
    started, before = time.perf_counter(), len(handle.losses)
    while len(handle.losses) < before + count:
        time.sleep(1e-4)
    return time.perf_counter() - started


def measure(repeats: int) -> dict[str, Any]:
    """Medians of so many turns; milliseconds."""
    torch.manual_seed(0)
    job = job_of(TASKS["vae"], 16, "steady")
    job.epochs, job.steps, job.capture = 10**6, None, True
    times: dict[str, list[float]] = {}
    returned: list[int] = []
    with wf.Engine(SMALL + GIB + GIB // 4, lanes=2, threads=1) as engine:
        other, steady = engine.submit(toucher()), engine.submit(job)
        limits = engine._loop.limits
        shrink_or_grow = limits._shrink_or_grow

        def timed(budget: int, units: int) -> None:
            started = time.perf_counter()
            shrink_or_grow(budget, units)
            times.setdefault(way, []).append(1e3 * (time.perf_counter() - started))

        limits._shrink_or_grow = timed  # type: ignore[method-assign]
        for _ in range(repeats):
            wait_for_steps(other, 3)
            wait_for_steps(steady, 3)
            for way, budget in (("shrink", SMALL), ("grow", SMALL + GIB + GIB // 4)):
                held, asked = resident_bytes(), time.perf_counter()
                engine.resize(budget)
                times.setdefault(f"{way}_asked", []).append(1e3 * (time.perf_counter() - asked))
                if way == "shrink":
                    returned.append(held - resident_bytes())
                times.setdefault(f"{way}_next_step", []).append(1e3 * wait_for_steps(steady, 1))
        engine.stop_all()
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {
        "shrink_ms_per_gib": round(middle["shrink"] * GIB / (GIB + GIB // 4), 3),
        "grow_ms_per_gib": round(middle["grow"] * GIB / (GIB + GIB // 4), 3),
        "shrink_returned_bytes": int(statistics.median(returned)),
        **{f"{key}_ms": round(value, 3) for key, value in middle.items() if "_" in key},
        "resizes": repeats,
    }


def main() -> None:
    options = arguments(__doc__ or "", 7)
    torch.set_num_threads(1)
    show(measure(options.repeats), options.json)


if __name__ == "__main__":
    main()
