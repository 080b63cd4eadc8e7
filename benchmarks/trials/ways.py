"""The ways in which a case's trials can be trained; each returns the wall time in seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import waterflow as wf
from benchmarks.trials import stacked
from benchmarks.trials.case import Case, Size, Train
from benchmarks.trials.cases import all_cases

MEMORY = "4GiB"
PROCESSES = 2
#: Seconds after which a compilation is given up.
COMPILE_LIMIT = 300.0


def lane_threads() -> int:
    """Intra-op threads where two train side by side."""
    return max(1, torch.get_num_threads() // 2)


def timed(case: Case, train: Train) -> tuple[float, list[list[float]]]:
    gc.collect()  # what ran before has left garbage, which is not this way's
    started = time.perf_counter()
    losses = case.run(train)
    return time.perf_counter() - started, losses


def loops(threads: int) -> Train:
    """One plain loop after another."""
    return lambda jobs: [wf.run_eager(job, threads).losses for job in jobs]


def with_waterflow(case: Case) -> tuple[float, list[list[float]]]:
    """An engine of its own, with an empty cache."""
    before = os.environ.get("WATERFLOW_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WATERFLOW_CACHE"] = folder
        try:
            return _with_engine(case) if case.asks else timed(case, _run)
        finally:
            os.environ.pop("WATERFLOW_CACHE")
            if before is not None:
                os.environ["WATERFLOW_CACHE"] = before


def _run(jobs: Sequence[wf.Job]) -> list[list[float]]:
    report = wf.run(jobs, memory=MEMORY)
    assert report.ok, [job.error for job in report]
    return [report[job.name].losses for job in jobs]


def _with_engine(case: Case) -> tuple[float, list[list[float]]]:
    gc.collect()
    started = time.perf_counter()
    with wf.Engine(memory=MEMORY) as engine:

        def train(jobs: Sequence[wf.Job]) -> list[list[float]]:
            results = [handle.result() for handle in [engine.submit(job) for job in jobs]]
            assert all(found.error is None for found in results), [r.error for r in results]
            return [found.losses for found in results]

        losses = case.run(train)
    return time.perf_counter() - started, losses


def with_vmap(case: Case) -> float:
    """The faster of few threads and all, as for the loops."""
    threads = torch.get_num_threads()
    found = []
    try:
        for count in sorted({lane_threads(), threads}):
            torch.set_num_threads(count)
            found.append(timed(case, stacked.train)[0])
    finally:
        torch.set_num_threads(threads)
    return min(found)


def with_processes(name: str, size: Size) -> float:
    """Each process is started anew and trains its share of the trials, one after another."""
    started = time.perf_counter()
    _in_children(_train_share, [(name, size, part) for part in range(PROCESSES)])
    return time.perf_counter() - started


def _train_share(name: str, size: Size, part: int, answer: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PROCESSES))
    case = all_cases()[name].sized(size).part(part, PROCESSES)
    case.prepare()
    case.run(loops(torch.get_num_threads()))
    answer.send(0.0)


def with_compile(name: str, size: Size) -> float | None:
    """In a process of its own, for what is compiled stays; its start is not counted."""
    try:
        return _in_children(_train_compiled, [(name, size)], COMPILE_LIMIT)[0]
    except ChildError as error:
        print(f"{name}: not compiled: {error}", file=sys.stderr)
        return None


def _train_compiled(name: str, size: Size, answer: Any) -> None:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # or processes are started to compile in
    case = all_cases()[name].sized(size)
    case.prepare()
    compiled: dict[Any, Any] = {}

    def train(jobs: Sequence[wf.Job]) -> list[list[float]]:
        for job in jobs:
            job.loss = compiled.setdefault(job.loss, torch.compile(job.loss))
        return [wf.run_eager(job).losses for job in jobs]

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        answer.send(timed(case, train)[0])


class ChildError(RuntimeError):
    """A process ended without its answer."""


def _in_children(
    work: Callable[..., None], arguments: list[tuple[Any, ...]], limit: float | None = None
) -> list[float]:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in arguments]
    children = [
        spawn.Process(target=work, args=(*given, pipe[1]))
        for given, pipe in zip(arguments, pipes, strict=True)
    ]
    for child in children:
        child.start()
    for _, end in pipes:
        end.close()  # so that a child that dies is seen as the end of its answer
    try:
        if limit is not None and not all(pipe[0].poll(limit) for pipe in pipes):
            for child in children:
                child.terminate()
            raise ChildError(f"not done after {limit} s")
        answers = [float(pipe[0].recv()) for pipe in pipes]
    except EOFError:
        raise ChildError(f"exit codes {[child.exitcode for child in children]}") from None
    finally:
        for child in children:
            child.join()
    return answers
