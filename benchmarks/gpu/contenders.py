"""waterflow as a contender, and the functions that a worker process is asked for."""

from __future__ import annotations

import gc
import re
import threading
import time
from typing import Any

import torch

import waterflow as wf
from benchmarks.gpu.baselines import (
    Compiled,
    Contender,
    Eager,
    EagerReading,
    Threads,
    Vmap,
    synchronize,
    use_rmm,
)
from benchmarks.gpu.gate import Gate
from benchmarks.gpu.jobs import Case, make_batches, make_job

#: Steps before anything is timed: lazily made state, autotuning, the allocator's first blocks.
SETUP_STEPS = 3

#: What a worker process can be asked for by name; arguments and results are what JSON can hold.
__all__ = [
    "close_contender",
    "count_calls",
    "measure_contender",
    "open_contender",
    "use_rmm",
    "warm_up",
]

#: No slice takes this long, nor capturing two jobs: something hangs, or one of the jobs has failed.
_PATIENCE_SECONDS = 90.0


class Waterflow(Contender):
    """One run of wf.run in a thread of its own; between slices its jobs wait at a gate."""

    def __init__(
        self, case: Case, jobs: int, memory: str, policy: str, capture: bool | str = "auto"
    ) -> None:
        super().__init__(case, jobs)
        self._gate = Gate(jobs)
        self._capture = capture
        self._report: wf.Report | None = None
        made = [self._make(index) for index in range(jobs)]
        options = {"memory": memory, "device": case.device, "policy": policy}
        self._thread = threading.Thread(target=self._run, args=(made, options), daemon=True)
        self._thread.start()

    def _make(self, index: int) -> wf.Job:
        return make_job(
            self.case,
            f"job-{index}",
            seed=index,
            data=self._gate.batches(make_batches(self.case)),
            scheduler=self._gate.counter(index),
            capture=self._capture,
        )

    def _run(self, jobs: list[wf.Job], options: dict[str, Any]) -> None:
        try:
            self._report = wf.run(jobs, **options, progress=False)
            failed = [
                f"{job.name}: {job.error_type}: {job.error}" for job in self._report if job.error
            ]
            if failed:
                self._gate.fail(RuntimeError("; ".join(failed)))
        except BaseException as error:
            self._gate.fail(error)

    def advance(self, steps: int) -> None:
        try:
            self._gate.run(steps, _PATIENCE_SECONDS)
        except TimeoutError:
            # A job that failed makes no steps, and the others still wait: the report says why.
            self.close()
            self._gate.run(0, 0.0)
            raise

    def close(self) -> dict[str, Any]:
        self._gate.close()
        self._thread.join(_PATIENCE_SECONDS)
        if self._report is None:
            return {}
        report = self._report
        syncs = getattr(report, "syncs", None)
        steps = sum(job.steps for job in report)
        return {
            "peak_bytes": report.peak_bytes,
            "budget_bytes": report.budget_bytes,
            "captured": sorted({job.captured for job in report}),
            "syncs_per_step": None if syncs is None or not steps else syncs / steps,
        }


KINDS: dict[str, type[Contender]] = {
    "eager": Eager,
    "eager_reading": EagerReading,
    "compile": Compiled,
    "threads": Threads,
    "vmap": Vmap,
    "waterflow": Waterflow,
}

_open: dict[str, Contender] = {}

#: "cudaLaunchKernel", "cuStreamSynchronize"; no kernels, such as those of cutlass.
_API_CALL = re.compile("cu(da)?[A-Z]")


def open_contender(
    name: str, kind: str, case: dict[str, Any], jobs: int, options: dict[str, Any]
) -> dict[str, float]:
    """Makes a contender and runs it until it is warm; returns how long that took."""
    started = time.perf_counter()
    made = Case(**case)
    contender = KINDS[kind](made, jobs, **options)
    try:
        contender.advance(SETUP_STEPS)
        synchronize(made.device)
    except BaseException:
        contender.close()
        raise
    _open[name] = contender
    seconds = time.perf_counter() - started
    contender.rest()
    return {"setup_seconds": seconds}


def measure_contender(name: str, steps: int) -> dict[str, float]:
    """Times a slice of an open contender."""
    return _open[name].measure(steps)


def count_calls(name: str, steps: int) -> dict[str, float] | None:
    """CUDA calls per step of an open contender, by name; None where they cannot be watched."""
    from torch.profiler import ProfilerActivity, profile

    contender = _open[name]
    if contender.case.device == "cpu":
        return None
    contender.advance(1)
    synchronize(contender.case.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        contender.advance(steps)
    synchronize(contender.case.device)
    counts = {event.key: event.count / steps for event in recorded.key_averages()}
    return {key: count for key, count in counts.items() if _API_CALL.match(key)} or None


def close_contender(name: str) -> dict[str, Any]:
    """Ends an open contender and gives back what it held."""
    contender = _open.pop(name)
    result = contender.close()
    device = contender.case.device
    del contender
    make_batches.cache_clear()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return result


def warm_up(device: str, seconds: float) -> bool:
    """Matrix products for a while: clocks of memory and cores rise to what they stay at."""
    side = 256 if device == "cpu" else 4096
    matrix = torch.randn(side, side, device=device)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix = torch.tanh(matrix @ matrix)
        synchronize(device)
    return True
