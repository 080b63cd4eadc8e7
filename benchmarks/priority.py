"""A guaranteed job beside an opportunistic one: what it loses, and what the other one gets.

    python -m benchmarks.priority --json

`pairs`: the guaranteed job's time a step beside the other one over its time alone, less one, with
nobody held back (`slowdown_unthrottled`) and with throttling (`slowdown`), and their standard
errors; `opportunistic_share` is the other job's speed over its own alone. What a step takes on a
shared machine wanders within tenths of a second by more than is looked for, so the slowdown is what
the engine's own comparisons find (`SlowdownMeasured`), in turns of some milliseconds.
`slowdown_of_hardware` is the first job's slowdown, found in the same way and between the other
runs, where it is a plain loop and the other one trains in an engine of another process, each on one
core: what no engine can do anything about. Null where there is one core.

`table2`: AntMan's two jobs (its Table 2) scaled down: A, opportunistic, is there first; B,
guaranteed, comes a little later. Seconds from each one's coming to its end; null where the way
fails the job. `paper_minutes` are the paper's. Universal memory has no counterpart on the CPU.

`two_phase`: a guaranteed job whose second phase has four times the batch, beside an opportunistic
one: its seconds alone, side by side without priorities, and with them. (AntMan, section 5.2.)
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from waterflow.allocator_ext import _C
from waterflow.engine.events import SlowdownMeasured
from waterflow.models.zoo import TASKS
from waterflow.partitioner.policies.coordinator import TOLERANCE
from waterflow.report.slowdown import Slowdown

PAIRS = (
    ("resnet50_small", "gcn_small", 4),
    ("bert_base_small", "lstm_lm_small", 4),
    ("espcn_small", "vae_small", 8),
)


class Times(NamedTuple):
    """Seconds of a run of two jobs."""

    before: float  # in which the duty finds its way
    measured: float
    alone: float  # of the opportunistic job, once before and once after


TIMES = Times(before=30.0, measured=40.0, alone=3.0)
#: Seconds from the suspension of one job to the measurement of the other.
SETTLING = 0.2
#: Seconds between two looks at a job that is to make a step, and after which it stands still.
POLL, PATIENCE = 0.0005, 0.5
#: Seconds of comparisons of a plain loop.
PLAIN_SECONDS = 10.0
#: Batches of the data: an epoch of a few would be over in some milliseconds, and each begins with
#: the user's Python.
BATCHES = 256
ENDLESS = 10**9
MEMORY = "4GiB"

PAPER = {
    "preempt": {"a": None, "b": 91.1},
    "fifo": {"a": 43.0, "b": 108.2},
    "pack": {"a": 43.1, "b": None},
    "universal memory": {"a": 43.4, "b": 541.6},
    "antman": {"a": 43.9, "b": 91.8},
}


def job(
    task_name: str,
    name: str,
    sizes: Sequence[int],
    steps: int,
    priority: str,
    max_slowdown: float = TOLERANCE,
) -> wf.Job:
    """A task of the zoo on batches of these sizes, one after another and again."""
    task = TASKS[task_name]
    torch.manual_seed(0)
    model = task.model()
    data = [task.batch(size) for size in sizes]
    optimizer = task.optimizer(model.parameters())
    return wf.Job(
        name,
        model=model,
        optimizer=optimizer,
        loss=task.loss,
        data=data,
        steps=steps,
        seed=0,
        priority=priority,
        capture=True,
        max_slowdown=max_slowdown,
    )


class Beside(NamedTuple):
    """What two jobs did in one engine."""

    slowdown: Slowdown  # of the first, as the engine has measured it
    share: float  # the other one's steps a second beside it over those alone


def steps_of(handle: wf.JobHandle) -> int:
    """Those that the job has made."""
    return len(handle.losses)


def at_next_step(handle: wf.JobHandle) -> tuple[float, int]:
    """When the job has made its next step, and how many it has made then. One that stands still is
    not waited for."""
    before, began = steps_of(handle), time.perf_counter()
    while (made := steps_of(handle)) == before and time.perf_counter() < began + PATIENCE:
        time.sleep(POLL)
    return time.perf_counter(), made


def speed(handle: wf.JobHandle, seconds: float) -> float:
    """Steps a second in so many seconds, or a little more: whole steps."""
    begun, before = at_next_step(handle)
    time.sleep(seconds)
    ended, made = at_next_step(handle)
    return (made - before) / (ended - begun)


def speed_alone(handle: wf.JobHandle, other: wf.JobHandle, seconds: float) -> float:
    """While the other job is suspended."""
    other.suspend()
    time.sleep(SETTLING)
    found = speed(handle, seconds)
    other.resume()
    return found


def side_by_side(engine: wf.Engine, one: wf.JobHandle, two: wf.JobHandle, times: Times) -> Beside:
    """A guaranteed job beside an opportunistic one, once the duty has found its way."""
    slowdown, measures = Slowdown(), threading.Event()

    def note(event: object) -> None:
        assert isinstance(event, SlowdownMeasured)
        if measures.is_set():
            slowdown.add(event.slowdown, event.error, event.seconds)

    engine.subscribe(note, SlowdownMeasured)
    while min(steps_of(one), steps_of(two)) < 5:
        time.sleep(0.01)
    alone = speed_alone(two, one, times.alone)
    time.sleep(times.before)
    measures.set()
    beside = speed(two, times.measured)
    measures.clear()
    alone += speed_alone(two, one, times.alone)
    return Beside(slowdown, 2 * beside / alone)


def beside_each_other(first: str, other: str, size: int, max_slowdown: float) -> Beside:
    """Two tasks of the zoo."""
    with wf.Engine(MEMORY, threads=1) as engine:
        sizes = [size] * BATCHES
        one = engine.submit(job(first, "first", sizes, ENDLESS, "guaranteed", max_slowdown))
        two = engine.submit(job(other, "other", sizes, ENDLESS, "opportunistic"))
        found = side_by_side(engine, one, two, TIMES)
        engine.stop_all()
    return found


def train_plainly(task_name: str, size: int) -> Iterator[None]:
    """The usual loop, a step at a time."""
    torch.set_num_threads(1)
    one = job(task_name, "plain", [size] * BATCHES, ENDLESS, "normal")
    task, optimizer = TASKS[task_name], one.optimizer
    while True:
        for batch in one.data:
            optimizer.zero_grad()
            task.loss(one.model, batch).backward()
            optimizer.step()
            yield


def train_until_killed(task_name: str, size: int, core: int, begun: Any) -> None:
    """In an engine on one core: its steps take as much of the memory as beside another job."""
    os.sched_setaffinity(0, {core})
    with wf.Engine(MEMORY, lanes=1, threads=1) as engine:
        handle = engine.submit(job(task_name, "other", [size] * BATCHES, ENDLESS, "normal"))
        while steps_of(handle) < 5:
            time.sleep(0.01)
        begun.set()
        handle.result()


@contextmanager
def other_process(task_name: str, size: int, core: int) -> Iterator[int]:
    """A job in an engine of a process of its own; the process's number."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    loop = spawn.Process(target=train_until_killed, args=(task_name, size, core, begun))
    loop.start()
    try:
        begun.wait()
        assert loop.pid is not None
        yield loop.pid
    finally:
        loop.kill()
        loop.join()


def hardware_slowdown(first: str, other: str, size: int) -> Slowdown:
    """Of a plain loop beside another job, which is on the next core and stopped in turns; nothing
    where there is one core."""
    found, cores = Slowdown(), sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return found
    try:
        with other_process(other, size, cores[1]) as process:
            os.sched_setaffinity(0, cores[:1])
            steps = itertools.islice(train_plainly(first, size), 20, None)
            while found.seconds < PLAIN_SECONDS:
                begun = time.perf_counter()
                found.add(*compared(steps, process), time.perf_counter() - begun)
    finally:
        os.sched_setaffinity(0, cores)
    return found


def compared(steps: Iterator[None], process: int) -> tuple[float, float]:
    """One comparison of these steps, as the engine makes it: the slowdown and its error."""
    alternation, held = _C.Alternation(_C.Precedence(), TOLERANCE, 4.0), False
    while (harm := alternation.harm) is None:
        if alternation.holds != held:
            held = not held
            os.kill(process, signal.SIGSTOP if held else signal.SIGCONT)
        alternation.begin()
        next(steps)
        alternation.step_done(0)
    return harm


def pair(first: str, other: str, size: int, repeats: int) -> dict[str, object]:
    """One row of `pairs`."""
    found: dict[float, list[Beside]] = {TOLERANCE: [], math.inf: []}
    of_hardware: list[Slowdown] = []
    for _ in range(repeats):
        for max_slowdown, before in found.items():
            of_hardware.append(hardware_slowdown(first, other, size))
            before.append(beside_each_other(first, other, size, max_slowdown))
    hardware = together(of_hardware)
    return {
        "guaranteed": first,
        "opportunistic": other,
        "slowdown_of_hardware": hardware.mean if hardware.seconds else None,
        "slowdown_of_hardware_error": hardware.error if hardware.seconds else None,
        **row(found[TOLERANCE], ""),
        **row(found[math.inf], "_unthrottled"),
    }


def together(parts: Sequence[Slowdown]) -> Slowdown:
    """What several measurements have found."""
    found = Slowdown()
    for part in parts:
        found.add(part.mean, part.error, part.seconds)
    return found


def row(runs: Sequence[Beside], way: str) -> dict[str, float]:
    """Keys of `pairs` from several runs of one way."""
    slowdown = together([run.slowdown for run in runs])
    return {
        f"slowdown{way}": slowdown.mean,
        f"slowdown{way}_error": slowdown.error,
        f"opportunistic_share{way}": statistics.median(run.share for run in runs),
    }


def ends(way: str, size_a: int, size_b: int, steps: tuple[int, int], delay: float) -> list[float]:
    """Seconds from the coming of A and of B to their ends; infinite where the way fails one."""
    ranks = ("opportunistic", "guaranteed") if way == "antman" else ("normal", "normal")
    a = job("gcn_small", "a", [size_a], steps[0], ranks[0])
    b = job("resnet50_small", "b", [size_b], steps[1], ranks[1])
    with wf.Engine(MEMORY, threads=1) as engine:
        came = [time.perf_counter(), 0.0]
        first = engine.submit(a)
        time.sleep(delay)
        came[1] = time.perf_counter()
        if way == "preempt":
            first.stop()
        if way == "fifo":
            first.result()
        second = engine.submit(b)
        left = {0: first, 1: second}
        found = [float("inf")] * 2
        while left:
            for place, handle in list(left.items()):
                if handle.status not in ("queued", "running", "suspended"):
                    stopped = handle.status == "stopped"
                    found[place] = float("inf") if stopped else time.perf_counter() - came[place]
                    del left[place]
            time.sleep(0.005)
    return found


def table2(repeats: int) -> dict[str, dict[str, float | None]]:
    """Seconds of A and B under each way."""
    size_a, size_b, steps, delay = 4, 4, (8000, 300), 1.0
    rows: dict[str, dict[str, float | None]] = {}
    times = {way: list[list[float]]() for way in ("preempt", "fifo", "pack", "antman")}
    for _ in range(repeats):
        for way, found in times.items():
            found.append(ends(way, size_a, size_b, steps, delay))
    for way, found in times.items():
        medians = [statistics.median(one[place] for one in found) for place in (0, 1)]
        a, b = (None if seconds == float("inf") else seconds for seconds in medians)
        rows[way] = {"a": a, "b": b}
    return rows


def phases(other: bool, managed: bool) -> float:
    """Seconds of a job of two phases, as it trains them one after another."""
    ranks = ("guaranteed", "opportunistic") if managed else ("normal", "normal")
    seconds = 0.0
    with wf.Engine(MEMORY, threads=1) as engine:
        if other:
            engine.submit(job("gcn_small", "other", [4], ENDLESS, ranks[1]))
        for number, (size, steps) in enumerate(((2, 400), (8, 150))):
            begun = time.perf_counter()
            engine.submit(
                job("resnet50_small", f"phase {number}", [size], steps, ranks[0])
            ).result()
            seconds += time.perf_counter() - begun
        engine.stop_all()
    return seconds


def main() -> None:
    options = arguments(__doc__ or "", repeats=3, pairs="so many of the pairs, and nothing else")
    torch.set_num_threads(1)
    if options.pairs is not None:
        pairs = [pair(*names, repeats=options.repeats) for names in PAIRS[: options.pairs]]
        show({"pairs": pairs}, options.json)
        return
    found = interleaved(
        {
            "alone": lambda: phases(False, False),
            "packed": lambda: phases(True, False),
            "managed": lambda: phases(True, True),
        },
        options.repeats,
    )
    result: dict[str, object] = {
        "pairs": [pair(*names, repeats=options.repeats) for names in PAIRS],
        "table2": table2(options.repeats),
        "paper_minutes": PAPER,
        "two_phase": {way: statistics.median(times) for way, times in found.items()},
    }
    show(result, options.json)


if __name__ == "__main__":
    main()
