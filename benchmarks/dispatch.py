"""Cost of launching: a step of about 1,200 small operators, alone and on two lanes; and what the
engine itself takes for a step of next to nothing.

    python -m benchmarks.dispatch --json

The same plain SGD with momentum everywhere, one intra-op thread each. Ratios of time per step;
above 1 means faster. Times are of steps alone: of a long run less a short one, as both begin alike.
An overhead is the time of a step of one linear layer less that of its tape.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.common import arguments, interleaved, median_ratio, show
from waterflow.allocator_ext import _C
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.lanes import Lanes

#: Steps of a short run and of a long one.
STEPS = (100, 400)
TINY_STEPS = (2000, 8000)
DEPTH = 67
WIDTH = 16


class Residual(nn.Module):
    """x + tanh(Wx): without the shortcut so deep a net's gradients become denormal, and slow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def make_job(name: str, steps: int) -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(DEPTH)), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    batch = (torch.randn(32, WIDTH), torch.randint(4, (32,)))
    return wf.Job(
        name,
        model=model,
        optimizer=optimizer,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=[batch] * steps,
        seed=0,
        capture=True,
    )


def per_step(seconds: Callable[[int], float], lengths: tuple[int, int]) -> float:
    """Seconds of a step, of a run that takes so many for so many steps."""
    short, long = map(seconds, lengths)
    return (long - short) / (lengths[1] - lengths[0])


def report_of(jobs: list[wf.Job], policy: str) -> wf.Report:
    report = wf.run(jobs, memory="64MiB", policy=policy, threads=1)
    assert report.ok, [job.error for job in report]
    return report


def eager_seconds() -> float:
    """Of a step of one job."""
    return per_step(lambda steps: wf.run_eager(make_job("a", steps), threads=1).wall_seconds, STEPS)


def engine_seconds(names: str, policy: str) -> float:
    """Of a step of each of these jobs."""

    def seconds(steps: int) -> float:
        return report_of([make_job(name, steps) for name in names], policy).seconds

    return per_step(seconds, STEPS)


def make_tiny(name: str, kind: str, steps: int) -> wf.Job:
    """A step of one linear layer; `kind` says what of the user's comes after it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = (torch.randn(4, 8), torch.randint(4, (4,)))
    job = wf.Job(
        name,
        model=model,
        optimizer=optimizer,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=[batch] * steps,
        seed=0,
        capture=True,
    )
    if kind == "scheduler":
        job.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    if kind == "on_step":
        job.on_step = lambda _: None
    return job


def tiny_seconds(names: str, policy: str, kind: str = "plain") -> tuple[float, float]:
    """Seconds of a step of any of these jobs: of the run, and of the lane that runs its tape."""
    on_lanes: list[float] = []

    def seconds(steps: int) -> float:
        report = report_of([make_tiny(name, kind, steps) for name in names], policy)
        on_lanes.append(float(np.median(report.spans.stop - report.spans.start)))
        return report.seconds

    return per_step(seconds, TINY_STEPS) / len(names), on_lanes[-1]


def overhead(kind: str) -> float:
    """What a step of one linear layer costs beside its tape, in seconds."""
    whole, tape = tiny_seconds("a", "flow", kind)
    return whole - tape


def count_operators() -> int:
    from waterflow.executor.run.rng import JobRng
    from waterflow.steps.job_steps import JobSteps

    job = make_job("a", 1)
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    found = steps.preparer.prepare(next(iter(job.data))).specialization
    assert found is not None
    assert found.steady is not None
    return len(found.steady.compiled.tape)


def pair_boundary_seconds(pairs: int = 2000) -> float:
    """Barrier and sync between pairs: rounds of empty groups on two lanes, per pair."""
    lanes = Lanes(HostDevice(), 1 << 20, 2, 1, torch.get_num_threads())
    tapes = [_C.Tape(0, 0), _C.Tape(0, 0)]
    jobs = [(tape, None, number, None) for number, tape in enumerate(tapes)]
    tasks = [[(0, 0, pair, 0, 0), (1, 1, pair, 0, 0)] for pair in range(pairs)]
    round_ = _C.Round(jobs, tasks)
    thread = threading.Thread(target=lambda: (lanes.adopt_lane(0), timed.append(run())))
    timed: list[float] = []

    def run() -> float:
        started = time.perf_counter()
        lanes.run(round_)
        return (time.perf_counter() - started) / pairs

    thread.start()
    thread.join()
    lanes.close()
    return timed[0]


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    measures = {
        "eager": eager_seconds,
        "solo": lambda: engine_seconds("a", "temporal"),
        "sequential": lambda: engine_seconds("ab", "temporal"),
        "two_lanes": lambda: engine_seconds("ab", "flow"),
        "two_in_pairs": lambda: engine_seconds("ab", "waterwave"),
        "pair_boundary": pair_boundary_seconds,
        "plain": lambda: overhead("plain"),
        "scheduler": lambda: overhead("scheduler"),
        "on_step": lambda: overhead("on_step"),
        "four_flow": lambda: tiny_seconds("abcd", "flow")[0],
        "four_temporal": lambda: tiny_seconds("abcd", "temporal")[0],
    }
    interleaved(measures, 1)  # profiles are cached from here on
    found = interleaved(measures, options.repeats)
    eager_two = [2 * seconds for seconds in found["eager"]]
    result: dict[str, object] = {
        "operators": count_operators(),
        "eager_ms": 1e3 * statistics.median(found["eager"]),
        "tape_ms": 1e3 * statistics.median(found["solo"]),
        "solo_vs_eager": median_ratio(found["eager"], found["solo"]),
        "two_lanes_vs_sequential": median_ratio(found["sequential"], found["two_lanes"]),
        "two_in_pairs_vs_sequential": median_ratio(found["sequential"], found["two_in_pairs"]),
        "pair_boundary_us": 1e6 * statistics.median(found["pair_boundary"]),
        "two_lanes_vs_eager": median_ratio(eager_two, found["two_lanes"]),
        "four_tiny_flow_vs_temporal": median_ratio(found["four_temporal"], found["four_flow"]),
    }
    for kind in ("plain", "scheduler", "on_step"):
        result[f"overhead_us_{kind}"] = 1e6 * statistics.median(found[kind])
    for policy in ("flow", "temporal"):
        result[f"four_tiny_step_us_{policy}"] = 1e6 * statistics.median(found[f"four_{policy}"])
    show(result, options.json)


if __name__ == "__main__":
    main()
