"""One job planned into less memory than it needs, by spilling: its speed, and its measured peak.

    python -m benchmarks.elastic_memory --json
    python -m benchmarks.elastic_memory --models lstm --ratios 0.6 --threads 1
    python -m benchmarks.elastic_memory --picture speeds.png

Per model and limit the speed of a warm captured step over the unlimited one's, in turns with it and
with the step that has no plan: every value out right after its use, and in right before the next.
The limit is a share of the most bytes that the step holds when it is not limited, with the
persistent ones; the peak is the arena's. A limit under what one operator works on has a row without
a speed, and the smallest limit instead. `shrink_ms_per_gib` and `grow_ms_per_gib` are those of
`benchmarks.arena_resize`, and so are the other keys of times. With one intra-op thread the copy
lane has a core of its own where there are two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import waterflow as wf
from benchmarks import arena_resize
from benchmarks.common import show
from waterflow.executor.device.host import HostDevice
from waterflow.executor.plan.round_plan import RoundPlan, plan_round
from waterflow.executor.plan.spilled_step import spill_all
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.executor.run.rng import JobRng
from waterflow.job.training_step import eager_step
from waterflow.models.zoo import TASKS
from waterflow.partitioner import PlanJob, get_policy
from waterflow.partitioner.spill import LimitTooSmallError
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep
from waterflow.study.job_specs import job_of
from waterflow.study.view import draw_speed_by_limit

#: Tasks of the zoo and their batches.
MODELS = {
    "resnet50": ("resnet50", 4),
    "bert": ("bert_base", 2),
    "vgg16": ("vgg16", 4),
    "espcn": ("espcn", 8),
    "lstm": ("lstm_lm", 20),
}
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


class Bench:
    """A job whose captured step is run under one limit after another."""

    def __init__(self, task: str, batch: int, threads: int) -> None:
        torch.manual_seed(0)
        self.threads = threads
        self.job: wf.Job = job_of(TASKS[task], batch, task)
        self.steps = JobSteps(self.job, HostDevice(), JobRng(0), threads)
        self.batch = next(iter(self.job.data))
        eager_step(self.job, self.batch)  # makes the optimizer's state
        self.steps.cache.collect_persistent()
        prepared = self.steps.preparer.prepare(self.batch)
        assert prepared.specialization is not None, self.steps.opacity.step
        assert prepared.flat is not None
        assert prepared.specialization.steady is not None
        self.flat = prepared.flat
        self.specialization = prepared.specialization
        self.whole: PreparedStep = prepared.specialization.steady
        self.peak = self.steps.persistent.full_bytes + (
            self.whole.memory.profile.transient_peak_bytes
        )

    def limited(self, limit: int) -> PreparedStep:
        """The step planned into a limit; raises LimitTooSmallError."""
        spiller = self.steps.spiller
        spiller.set_limit(None)
        return spiller.spilled(spiller.origins[self.specialization], limit, None)

    def naive(self) -> PreparedStep:
        """The step with everything away whenever it is not used."""
        spiller = self.steps.spiller
        origin = spiller.origins[self.specialization]
        step = spiller._early(origin, None)
        if origin.use is None:
            origin.use = spiller.profiler.observe(step, None, origin.flat)
        full = self.steps.persistent.full_bytes
        plan = spill_all(step.compiled.lowered, origin.use, full, alignment=64)
        away = frozenset(meaning for inputs in plan.away.values() for meaning in inputs)
        self.steps.persistent.keep_away(away, plan.away_bytes)
        return spiller._prepared(origin, step, plan)


class Runner:
    """A step in an arena of its own."""

    def __init__(self, bench: Bench, step: PreparedStep, limit: int | None = None) -> None:
        self.bench, self.step = bench, step
        device = HostDevice()
        persistent = bench.steps.persistent
        if limit is None:
            limit = persistent.final_bytes + step.memory.extent
        self.lanes = Lanes(device, limit, 1, bench.threads, bench.threads)
        self.residency = Residency(self.lanes.arena, device)
        self.residency.move_in(0, persistent.all())
        profile = step.memory.profile
        job = PlanJob("a", profile, step.compiled.boundary or None)
        schedule = get_policy("temporal").schedule([job], limit)
        plan = plan_round(self.lanes.arena, schedule, [(0, step.compiled, step.memory)])
        assert plan is not None, "a step that was planned into its limit"
        self.plan: RoundPlan = plan
        bench.steps.binder.bind(step)
        for register, value in bench.steps.binder.registers(step).items():
            step.compiled.tape.set_register(register, value)

    def run(self) -> float:
        """Makes a step; returns its seconds."""
        self.step.compiled.tape.set_batch(list(self.bench.flat.tensors))
        started = time.perf_counter()
        self.plan.begin(self.lanes.arena, own_blocks=True)
        result = self.lanes.run(self.plan.round)
        result.wait()
        seconds = time.perf_counter() - started
        (error,) = result.errors
        if error is not None:
            raise error
        return seconds

    @property
    def peak(self) -> int:
        return int(self.lanes.arena.statistics().peak)

    def close(self) -> None:
        if self.step is not self.bench.whole:  # which others use as well
            self.step.compiled.unbind()
        self.residency.move_out(0)
        self.lanes.close()


def row(model: str, bench: Bench, whole: Runner, ratio: float, repeats: int) -> dict[str, Any]:
    limit = int(bench.peak * ratio) // 64 * 64
    found: dict[str, Any] = {"model": model, "limit_ratio": ratio, "limit_bytes": limit}
    try:
        planned = Runner(bench, bench.limited(limit), limit)
    except LimitTooSmallError as error:
        return {**found, "smallest_bytes": error.smallest}
    naive = Runner(bench, bench.naive())
    runners = (whole, planned, naive)
    for runner in runners:
        runner.run()
    times = [[runner.run() for runner in runners] for _ in range(repeats)]
    assert planned.plan.deviations == 0
    found["peak_bytes"] = planned.peak
    found["speed_ratio"] = round(statistics.median(a / b for a, b, _ in times), 3)
    found["naive_speed_ratio"] = round(statistics.median(a / c for a, _, c in times), 3)
    found["naive_peak_bytes"] = naive.peak
    found["step_ms"] = round(1e3 * statistics.median(b for _, b, _ in times), 2)
    spill = planned.step.spill
    found["copied_bytes"] = 0 if spill is None else spill.moved_bytes
    found["moves"] = 0 if spill is None else len(spill.plan.absences)
    planned.close()
    naive.close()
    return found


def measure(
    model: str, ratios: list[float], threads: int, repeats: int, tell: Callable[[Any], None]
) -> list[dict[str, Any]]:
    bench = Bench(*MODELS[model], threads)
    whole = Runner(bench, bench.whole)
    rows = []
    for ratio in ratios:
        rows.append(row(model, bench, whole, ratio, repeats))
        tell(rows[-1])
    whole.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of the lane")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved steps of each")
    parser.add_argument("--picture", type=Path, help="draw speed against limit, into this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def tell(found: dict[str, Any]) -> None:
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)

    rows = []
    for model in options.models:
        rows += measure(model, options.ratios, options.threads, options.repeats, tell)
    if options.picture is not None:
        picture_format = options.picture.suffix[1:] or "png"
        options.picture.write_bytes(draw_speed_by_limit(rows, picture_format))
    resizes = arena_resize.measure(options.repeats)
    tell(resizes)
    if options.json:
        show({"rows": rows, "threads": options.threads, **resizes}, as_json=True)


if __name__ == "__main__":
    main()
