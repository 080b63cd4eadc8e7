"""The allocator on the allocation log of one ResNet-50 training step, and the gaps in its plans.

    python -m benchmarks.allocator --json

``ns_per_pair``: an allocate and its free in the arena by best fit, one lock each; ``planned``: at
the places of a plan, as tapes do; against glibc's malloc and PyTorch's default CPU allocator on the
same log. ``extent_ratio``: the address range of a plan over the live peak, the largest of
ResNet-50's and the demo's models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from benchmarks.replay import Replay
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.models.resnet import resnet50
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep

REPLAYS = 20


def resnet_job(batch: int = 2, side: int = 96) -> wf.Job:
    torch.manual_seed(0)
    model = resnet50()
    images = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wf.Job(
        "resnet50",
        model=model,
        optimizer=optimizer,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=[images],
        seed=0,
    )


def prepare(job: wf.Job) -> tuple[JobSteps, PreparedStep]:
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    found = steps.preparer.prepare(next(iter(job.data))).specialization
    assert found is not None
    assert found.steady is not None
    return steps, found.steady


def extent_ratio(prepared: Iterable[tuple[JobSteps, PreparedStep]]) -> dict[str, float]:
    found = {}
    for steps, step in prepared:
        persistent = steps.persistent.final_bytes
        live = persistent + step.memory.profile.transient_peak_bytes
        found[steps.job.name] = (persistent + step.memory.extent) / live
    return found


def main() -> None:
    from waterflow.cli.demo_jobs import Size, make_tasks

    options = arguments(__doc__ or "", repeats=9)
    started = time.perf_counter()
    resnet = prepare(resnet_job())
    seconds = time.perf_counter() - started
    events = resnet[1].memory.profile.events
    sizes, ids = events["bytes"], events["id"]
    replay = Replay()

    def measure(allocator: str) -> float:
        return replay(sizes, ids, allocator, REPLAYS)

    names = ("arena", "planned", "malloc", "torch")
    found = interleaved({n: lambda n=n: measure(n) for n in names}, options.repeats)  # type: ignore[misc]
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = extent_ratio([resnet, *(prepare(task.job) for task in make_tasks(Size()))])
    result: dict[str, object] = {
        "ns_per_pair": medians["arena"],
        "planned_ns_per_pair": medians["planned"],
        "malloc_ns_per_pair": medians["malloc"],
        "torch_ns_per_pair": medians["torch"],
        "events": len(sizes),
        "extent_ratio": max(ratios.values()),
        "extent_ratios": ratios,
        "resnet50_prepare_seconds": seconds,
    }
    show(result, options.json)


if __name__ == "__main__":
    main()
