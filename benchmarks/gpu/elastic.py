"""Elastic memory and priorities on a GPU: spilling, suspension, another budget, who goes first.

    python -m benchmarks.gpu.elastic --json

The keys are those of the same measurements on the CPU (`benchmarks.elastic_memory`, `suspend`,
`priority`): `rows` is the speed of a job under a limit over its speed without one, with its peak;
`moved_bytes_per_second` is what its copies reach beside compute, `link` what the host's link gives
a copy that has it for itself, in bytes per second. `suspend_ms` is from the end of a step until the
job's memory on the device is free, `resume_ms` until it has made a step again. `shrink_ms_per_gib`
and `grow_ms_per_gib` are those of `Engine.resize`. `pairs`: a guaranteed job's step beside an
opportunistic one over alone, held back and not, and the share of its own speed that the other
keeps. What is short comes first: the time may not suffice for all.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import waterflow as wf
from benchmarks.gpu.jobs import Case, make_batches, make_job
from benchmarks.gpu.options import begin, goal, keep, parser, publish
from benchmarks.priority import Times, row, side_by_side, speed
from waterflow.common.units import parse_bytes
from waterflow.partitioner.policies.coordinator import TOLERANCE

CASES = [("resnet50", "fp32", 64), ("bert_base", "bf16", 32), ("lstm", "fp32", 64)]
TINY_CASES = [("resnet50", "fp32", 4)]
PAIRS = [("resnet50", "lstm"), ("bert_base", "resnet50"), ("mlp", "bert_base")]
TINY_PAIRS = [("mlp", "lstm")]
RATIOS = (0.8, 0.6, 0.5)
ENDLESS = 10**7
_LINK_BYTES = 256 << 20
_GIB = 1 << 30
#: Windows of a pair for each repeat, and how many pass before, in which a duty finds its way.
_WINDOWS, _FINDING = 5, 10


class Endless:
    """A case's batches, over and over."""

    def __init__(self, case: Case) -> None:
        self._batches = make_batches(case)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._batches


def endless(case: Case, name: str = "job", **options: Any) -> wf.Job:
    """A job that trains until it is stopped."""
    return make_job(case, name, data=Endless(case), steps=ENDLESS, epochs=None, **options)


def has_failed(handle: wf.JobHandle) -> bool:
    """Whether a job has ended, which none does by itself."""
    return handle.status not in ("queued", "running", "suspended")


@contextmanager
def training(
    memory: str, device: str, *jobs: wf.Job
) -> Iterator[tuple[wf.Engine, list[wf.JobHandle]]]:
    """Jobs that have made their first steps."""
    with wf.Engine(memory, device=device) as engine:
        handles = [engine.submit(job) for job in jobs]
        while not all(len(handle.losses) > 8 or has_failed(handle) for handle in handles):
            time.sleep(0.01)
        try:
            yield engine, handles
        finally:
            engine.stop_all()


def link(device: str) -> dict[str, float] | None:
    """Bytes per second of copies between page-locked memory and the device."""
    if device == "cpu":
        return None
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)

    def rate(copy: Callable[[], Any]) -> float:
        copy()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(8):
            copy()
        torch.cuda.synchronize()
        return 8 * _LINK_BYTES / (time.perf_counter() - started)

    return {
        "out": rate(lambda: host.copy_(there, non_blocking=True)),
        "in": rate(lambda: there.copy_(host, non_blocking=True)),
    }


def under_limit(case: Case, limit: int | None, memory: str, window: float) -> dict[str, Any]:
    """A job's speed and peak under a limit; only its error where that is refused."""
    job = endless(case, memory_limit=limit)
    with training(memory, case.device, job) as (engine, (handle,)):
        if has_failed(handle):
            return {"error": str(handle.result().error)}
        reached = speed(handle, window)
        (run,) = engine._queue.jobs
        spilled = [step.spill for step in run.steps.cache.steps() if step.spill is not None]
    report = handle.result()
    moved = max((plan.moved_bytes for plan in spilled), default=0)
    return {
        "steps_per_second": reached,
        "peak_bytes": report.peak_bytes,
        "need_bytes": run.needs.memory.alone_bytes,
        "moved_bytes": moved,
        "moved_bytes_per_second": moved * reached,
    }


def spilling(case: Case, memory: str, window: float) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    whole = under_limit(case, None, memory, window)
    for ratio in (1.0, *RATIOS):
        limit = int(whole["need_bytes"] * ratio)
        found = under_limit(case, limit, memory, window)
        reached = found.get("steps_per_second")
        yield {
            "model": str(case),
            "limit_ratio": ratio,
            "limit_bytes": limit,
            "speed_ratio": None if reached is None else reached / whole["steps_per_second"],
            **found,
        }


class Marks:
    """When a job's steps ended."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps, self.ended = 0, 0.0

    def __call__(self, result: wf.StepResult) -> None:
        with self.changed:
            self.steps, self.ended = result.step, time.perf_counter()
            self.changed.notify_all()


def suspension(case: Case, memory: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a suspension and of a resumption, medians."""
    marks, rests, returns = Marks(), [], []
    with training(memory, case.device, endless(case, on_step=marks)) as (_, (handle,)):
        for _ in range(max(3, repeats)):
            assert handle.suspend(timeout=60)
            rests.append(time.perf_counter() - marks.ended)
            started, before = time.perf_counter(), marks.steps
            handle.resume()
            with marks.changed:
                marks.changed.wait_for(lambda before=before: marks.steps > before, 60)  # type: ignore[misc]
            returns.append(marks.ended - started)
    return {
        "suspend_ms": 1e3 * statistics.median(rests),
        "resume_ms": 1e3 * statistics.median(returns),
    }


def resizing(memory: str, device: str, repeats: int) -> dict[str, float]:
    """Milliseconds a GiB of a smaller and a larger budget, medians; a job trains meanwhile."""
    whole = parse_bytes(memory)
    part = whole // 2
    shrinks, grows = [], []
    with training(
        memory, device, endless(Case(model="mlp", batch=4, device=device, tiny=True))
    ) as (
        engine,
        _,
    ):
        for _ in range(max(3, repeats)):
            for budget, times in ((part, shrinks), (whole, grows)):
                started = time.perf_counter()
                engine.resize(budget)
                times.append((time.perf_counter() - started) / ((whole - part) / _GIB))
    return {
        "shrink_ms_per_gib": 1e3 * statistics.median(shrinks),
        "grow_ms_per_gib": 1e3 * statistics.median(grows),
    }


def pair(first: Case, other: Case, memory: str, window: float, repeats: int) -> dict[str, Any]:
    """A row of `pairs`."""
    found: dict[str, float] = {}
    times = Times(_FINDING * window, 2 * _WINDOWS * repeats * window, 2 * window)
    for max_slowdown, way in ((TOLERANCE, ""), (math.inf, "_unthrottled")):
        jobs = [
            endless(first, "first", priority="guaranteed", max_slowdown=max_slowdown),
            endless(other, "other", priority="opportunistic"),
        ]
        with training(memory, first.device, *jobs) as (engine, (one, two)):
            found |= row([side_by_side(engine, one, two, times)], way)
    return {"guaranteed": str(first), "opportunistic": str(other), **found}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "", seconds=120, repeats=2).parse_args(arguments)
    deadline = begin(options)
    memory = options.memory or ("64MiB" if options.tiny else "32GiB")
    window = 0.2 if options.tiny else 2.0
    make = functools.partial(Case, device=options.device, tiny=options.tiny)
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {"memory": memory, "link": link(options.device), "goals": goals}
    result |= {"rows": [], "pairs": [], "not_reached": []}

    def reached(what: str) -> bool:
        if time.monotonic() < deadline:
            return True
        result["not_reached"].append(what)
        return False

    if reached("suspension"):
        result |= suspension(make(model="resnet50", batch=4), memory, options.repeats)
        keep(result, options)
    if reached("resizing"):
        result |= resizing(memory, options.device, options.repeats)
        keep(result, options)
    for first, other in TINY_PAIRS if options.tiny else PAIRS:
        if not reached(f"{first} beside {other}"):
            continue
        cases = [make(model=name, batch=4 if options.tiny else 32) for name in (first, other)]
        row = pair(cases[0], cases[1], memory, window / 4, options.repeats)
        result["pairs"].append(row)
        what = f"{first} beside {other}, which is held back: slowdown"
        goals.append(goal(what, row["slowdown"], 0.01, at_most=True))
        keep(result, options)
    for model, dtype, batch in options.cases or (TINY_CASES if options.tiny else CASES):
        case = make(model=model, dtype=dtype, batch=batch)
        if not reached(f"spilling, {case}"):
            continue
        for row in spilling(case, memory, window):
            result["rows"].append(row)
            if row["limit_ratio"] == 0.6:
                goals.append(goal(f"{case}: speed at 60 % of its peak", row["speed_ratio"], 0.8))
            keep(result, options)
    publish(result, options)


if __name__ == "__main__":
    main()
