"""A guaranteed job beside an opportunistic one: what it loses, and what the other one gets.

    python -m benchmarks.priority --json

`pairs`: the guaranteed job's time a step beside the other one over its time alone, less one, with
nobody guaranteed (`slowdown_unthrottled`) and with throttling (`slowdown`, and its standard error);
`opportunistic_share` is the other job's speed over its own alone. Windows are a tenth of a second.
With throttling it is that of the seconds in which the duty is free to change.
`slowdown_of_hardware` is the first job's slowdown where both are plain loops in processes of their
own, each on one core: what no engine can do anything about. Null where there is one core.

`table2`: AntMan's two jobs (its Table 2) scaled down: A, opportunistic, is there first; B,
guaranteed, comes a little later. Seconds from each one's coming to its end; null where the way
fails the job. `paper_minutes` are the paper's. Universal memory has no counterpart on the CPU.

`two_phase`: a guaranteed job whose second phase has four times the batch, beside an opportunistic
one: its seconds alone, side by side without priorities, and with them. (AntMan, section 5.2.)
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import operator
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from waterflow.models.zoo import TASKS

PAIRS = (
    ("resnet50_small", "gcn_small", 4),
    ("bert_base_small", "lstm_lm_small", 4),
    ("espcn_small", "vae_small", 8),
)
#: Seconds of a window, and between two, in which the one that is suspended ends its step, or the
#: one that goes on finds its place again, which others wait for.
WINDOW, SETTLING, RESUMING = 0.1, 0.02, 0.2
#: Seconds between two looks at a counter, where a window begins and ends with a step.
POLL = 0.0002
#: Seconds of windows of one run, and before, in which the duty finds its way.
SECONDS, BEFORE = 40.0, 20.0
#: With throttling, seconds before two windows in which nobody is suspended: a comparison that a
#: suspension breaks off tells nothing, and the duty would stay what it happened to be.
UNDISTURBED = 2.0
#: Seconds of windows of two plain loops.
PLAIN_SECONDS = 10.0
#: Batches of the data: with one, every step would be an epoch, and begin with the user's Python.
BATCHES = 16
ENDLESS = 10**9
MEMORY = "4GiB"

PAPER = {
    "preempt": {"a": None, "b": 91.1},
    "fifo": {"a": 43.0, "b": 108.2},
    "pack": {"a": 43.1, "b": None},
    "universal memory": {"a": 43.4, "b": 541.6},
    "antman": {"a": 43.9, "b": 91.8},
}


def job(task_name: str, name: str, sizes: Sequence[int], steps: int, priority: str) -> wf.Job:
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
    )


class Windows(NamedTuple):
    """What two jobs did in one engine."""

    slowdowns: list[float]  # the first job's seconds a step over those just before, alone, less one
    beside: list[float]  # the other one's steps a second beside it
    alone: list[float]  # and alone


def at_next(count: Callable[[], int]) -> tuple[float, int]:
    """When a counter goes on, and to what: a window that begins and ends there has whole steps. One
    that stands still is not waited for."""
    before, began = count(), time.perf_counter()
    while (now := count()) == before and time.perf_counter() - began < WINDOW:
        time.sleep(POLL)
    return time.perf_counter(), now


def speeds(counters: Sequence[Callable[[], int]], seconds: float) -> list[float]:
    """Steps a second that each of these counts in so many seconds, or a little longer."""
    begun = [at_next(count) for count in counters]
    time.sleep(seconds)
    ended = [at_next(count) for count in counters]
    return [(n - m) / (t - s) for (s, m), (t, n) in zip(begun, ended, strict=True)]


class Pair:
    """Two jobs of one engine and their steps a second, in windows in which not all are at work.

    The windows are short: on a shared machine what a step takes wanders over seconds by far more
    than what is looked for, so only windows that follow each other can be compared.
    """

    def __init__(self, first: wf.JobHandle, other: wf.JobHandle) -> None:
        self._handles = (first, other)
        self._at_work = [True, True]

    def speeds(self, *at_work: bool, seconds: float = WINDOW) -> list[float]:
        """In one window, with those suspended that are not to be at work."""
        resumed = any(map(operator.gt, at_work, self._at_work))
        for place, handle in enumerate(self._handles):
            if self._at_work[place] and not at_work[place]:
                handle.suspend()
            elif at_work[place] and not self._at_work[place]:
                handle.resume()
        self._at_work = list(at_work)
        time.sleep(RESUMING if resumed else SETTLING)
        counters = [functools.partial(steps_of, handle) for handle in self._handles]
        found = iter(speeds(list(itertools.compress(counters, at_work)), seconds))
        return [next(found) if works else 0.0 for works in at_work]


def steps_of(handle: wf.JobHandle) -> int:
    """Those that the job has made."""
    return len(handle.losses)


def windows(first: str, other: str, size: int, throttled: bool) -> Windows:
    """Two jobs side by side, with priorities or without."""
    ranks = ("guaranteed", "opportunistic") if throttled else ("normal", "normal")
    found = Windows([], [], [])
    with wf.Engine(MEMORY, threads=1) as engine:
        sizes = [size] * BATCHES
        one = engine.submit(job(first, "first", sizes, ENDLESS, ranks[0]))
        two = engine.submit(job(other, "other", sizes, ENDLESS, ranks[1]))
        while min(len(one.losses), len(two.losses)) < 5:
            time.sleep(0.01)
        if throttled:
            time.sleep(BEFORE)
        jobs, begun = Pair(one, two), time.perf_counter()
        while time.perf_counter() < begun + SECONDS:
            if throttled:
                found.beside.append(jobs.speeds(True, True, seconds=UNDISTURBED)[1])
            alone, _ = jobs.speeds(True, False)
            beside, kept = jobs.speeds(True, True)
            found.slowdowns.append(alone / max(beside, 1 / WINDOW) - 1)  # one step at least
            if not throttled:  # who is guaranteed would be unknown again after a suspension
                found.beside.append(kept)
                found.alone.append(jobs.speeds(False, True)[1])
        engine.stop_all()
    return found


def train_plainly(task_name: str, size: int, core: int, steps: Any) -> None:
    """The usual loop on one core; `steps` counts."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    one = job(task_name, "plain", [size] * BATCHES, ENDLESS, "normal")
    task, optimizer = TASKS[task_name], one.optimizer
    while True:
        for batch in one.data:
            optimizer.zero_grad()
            task.loss(one.model, batch).backward()
            optimizer.step()
            steps.value += 1


@contextmanager
def plain_loops(names: Sequence[str], size: int, cores: Sequence[int]) -> Iterator[list[Any]]:
    """Processes of their own that train these, with the counters of their steps."""
    spawn = multiprocessing.get_context("spawn")
    loops = []
    for name, core in zip(names, cores, strict=False):
        steps = spawn.Value("q", 0, lock=False)
        loop = spawn.Process(target=train_plainly, args=(name, size, core, steps), daemon=True)
        loop.start()
        loops.append((loop, steps))
    try:
        while min(steps.value for _, steps in loops) < 5:
            time.sleep(0.01)
        yield loops
    finally:
        for loop, _ in loops:
            loop.kill()
            loop.join()


def hardware_slowdown(first: str, other: str, size: int) -> float | None:
    """Of one plain loop beside another on the next core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    slowdowns = []
    with plain_loops((first, other), size, cores) as [(_, steps), (beside, _)]:
        begun = time.perf_counter()
        while time.perf_counter() < begun + PLAIN_SECONDS:
            alone_and_beside = []
            for sent in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(beside.pid, sent)
                time.sleep(SETTLING)
                alone_and_beside += speeds([lambda: steps.value], WINDOW)
            slowdowns.append(alone_and_beside[0] / alone_and_beside[1] - 1)
    return middle(slowdowns)[0]


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The mean without a tenth at each end, and its standard error."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    kept = ordered[cut : len(ordered) - cut]
    return statistics.mean(kept), statistics.stdev(ordered) / math.sqrt(len(ordered))


def pair(first: str, other: str, size: int, repeats: int) -> dict[str, object]:
    """One row of `pairs`."""
    found = {True: Windows([], [], []), False: Windows([], [], [])}
    for _ in range(repeats):
        for throttled, before in found.items():
            for all_, new in zip(before, windows(first, other, size, throttled), strict=True):
                all_.extend(new)
    slowdown, error = middle(found[True].slowdowns)
    alone, _ = middle(found[False].alone)
    return {
        "guaranteed": first,
        "opportunistic": other,
        "slowdown_of_hardware": hardware_slowdown(first, other, size),
        "slowdown_unthrottled": middle(found[False].slowdowns)[0],
        "slowdown": slowdown,
        "slowdown_error": error,
        "opportunistic_share_unthrottled": middle(found[False].beside)[0] / alone,
        "opportunistic_share": middle(found[True].beside)[0] / alone,
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
