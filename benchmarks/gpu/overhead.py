"""What waterflow costs a single job, who has nobody to share with; and what a sync costs.

    python -m benchmarks.gpu.overhead --json

`ratio`: time of a step under waterflow over the plain loop's, in the same turns; the goal is at
most 1. The plain loop never waits for the device; the one that reads each loss, as most do, is
beside it, and so is waterflow without captures (`uncaptured`). `host_ms_per_step` is processor time
of the whole process, all of its threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.options import DEFAULT_POLICY, begin, goal, keep, parser, publish
from benchmarks.gpu.race import Entry, ratio, run_cases
from benchmarks.gpu.worker import Worker

CASES = [
    ("resnet50", "fp32", 32),
    ("bert_base", "bf16", 32),
    ("lstm", "fp32", 32),
    ("mlp", "fp32", 64),
    ("bert_base", "fp32", 32),
    ("resnet50", "bf16", 128),
]

TINY_CASES = [("mlp", "fp32", 4)]

#: CUDA calls that make the host wait for the device.
_WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)


def entries(memory: str) -> list[Entry]:
    """One job each."""
    options = {"memory": memory, "policy": DEFAULT_POLICY}
    return [
        Entry(name="eager", kind="eager", jobs=1),
        Entry(name="waterflow", kind="waterflow", jobs=1, place="waterflow", options=options),
        Entry(name="eager_reading", kind="eager_reading", jobs=1),
        Entry(
            name="uncaptured",
            kind="waterflow",
            jobs=1,
            place="uncaptured",
            options={**options, "capture": False},
        ),
    ]


def sync_costs(repeats: int = 1000) -> dict[str, float] | None:
    """Microseconds of a sync where nothing is to wait for, amid small kernels, between streams."""
    if not torch.cuda.is_available():
        return None
    value = torch.zeros(1024, device="cuda")
    other = torch.cuda.Stream()

    def kernels(then: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            for _ in range(10):
                value.add_(1)
            then()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def hand_over() -> None:
        other.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(other)

    kernels(torch.cuda.synchronize)
    thens = (lambda: None, torch.cuda.synchronize, hand_over)
    alone, forced, handed = (min(kernels(then) for _ in range(3)) for then in thens)
    started = time.perf_counter()
    for _ in range(repeats):
        torch.cuda.synchronize()
    idle = time.perf_counter() - started
    scale = 1e6 / repeats
    return {
        "idle_sync_us": scale * idle,
        "forced_sync_us": scale * (forced - alone),
        "two_stream_handovers_us": scale * (handed - alone),
        "ten_kernels_us": scale * alone,
    }


def waits_per_step(calls: dict[str, float] | None) -> float | None:
    """How often a step makes the host wait, of the CUDA calls that were seen."""
    if calls is None:
        return None
    return sum(calls.get(name, 0.0) for name in _WAITS)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The ratios, and what a step asks of the host."""
    contenders = found["contenders"]
    return {
        "ratio": ratio(found, "waterflow", "eager"),
        "ratio_to_reading": ratio(found, "waterflow", "eager_reading"),
        "uncaptured_to_reading": ratio(found, "uncaptured", "eager_reading"),
        "host_ms_per_step": {n: c.get("host_ms_per_step") for n, c in contenders.items()},
        "syncs_per_step": contenders["waterflow"].get("syncs_per_step"),
        "waits_per_step": {
            n: waits_per_step(c.get("cuda_calls_per_step")) for n, c in contenders.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "", seconds=100, repeats=5).parse_args(arguments)
    deadline = begin(options)
    memory = options.memory or ("64MiB" if options.tiny else "32GiB")
    worker = Worker()
    result: dict[str, Any] = {"memory": memory, "cases": [], "goals": []}
    result["sync"] = worker.call("benchmarks.gpu.overhead:sync_costs", 120)
    worker.close()

    def note(found: dict[str, Any]) -> None:
        found.update(summary(found))
        result["cases"].append(found)
        what = f"{found['model']} {found['dtype']} batch {found['batch']}: alone, time over eager's"
        result["goals"].append(goal(what, found["ratio"], 1.0, at_most=True))
        keep(result, options)

    cases = options.cases or (TINY_CASES if options.tiny else CASES)
    result["not_reached"] = run_cases(
        cases, entries(memory), options, deadline, note, watched=("waterflow", "eager")
    )
    publish(result, options)


if __name__ == "__main__":
    main()
