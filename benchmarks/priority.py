"""A guaranteed job beside an opportunistic one: what it loses, and what the other one gets.

    python -m benchmarks.priority --json

`pairs`: the guaranteed job's time a step beside the other one over its time alone, less one, with
nobody guaranteed (`slowdown_unthrottled`) and with throttling (`slowdown`); `opportunistic_share`
is the other job's speed over its own alone. Windows of the three are interleaved.

`table2`: AntMan's two jobs (its Table 2) scaled down: A, opportunistic, is there first; B,
guaranteed, comes a little later. Seconds from each one's coming to its end; null where the way
fails the job. `paper_minutes` are the paper's. Universal memory has no counterpart on the CPU.

`two_phase`: a guaranteed job whose second phase has four times the batch, beside an opportunistic
one: its seconds alone, side by side without priorities, and with them. (AntMan, section 5.2.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from waterflow.models.zoo import TASKS

PAIRS = (
    ("resnet50_small", "gcn_small", 4),
    ("bert_base_small", "lstm_lm_small", 4),
    ("espcn_small", "vae_small", 8),
)
WINDOW = 3.0
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


def step_seconds(task: str, other: str | None, size: int, throttled: bool) -> tuple[float, float]:
    """The first job's seconds a step in one window, and the other one's steps a second."""
    first = job(task, "first", [size], ENDLESS, "guaranteed" if throttled else "normal")
    with wf.Engine(MEMORY, threads=1) as engine:
        handle = engine.submit(first)
        beside = None
        if other is not None:
            rank = "opportunistic" if throttled else "normal"
            beside = engine.submit(job(other, "other", [size], ENDLESS, rank))
        handles = [h for h in (handle, beside) if h is not None]
        while min(len(h.losses) for h in handles) < 5:
            time.sleep(0.01)
        time.sleep(WINDOW / 2)  # the coordinator settles
        begun, before = time.perf_counter(), [len(h.losses) for h in handles]
        time.sleep(WINDOW)
        took = time.perf_counter() - begun
        made = [len(h.losses) - b for h, b in zip(handles, before, strict=True)]
        engine.stop_all()
    return took / made[0], made[1] / took if len(made) > 1 else 0.0


def pair(first: str, other: str, size: int, repeats: int) -> dict[str, object]:
    """One row of `pairs`."""
    others: list[float] = []

    def managed() -> float:
        seconds, speed = step_seconds(first, other, size, True)
        others.append(speed)
        return seconds

    found = interleaved(
        {
            "alone": lambda: step_seconds(first, None, size, False)[0],
            "beside": lambda: step_seconds(first, other, size, False)[0],
            "managed": managed,
            "other alone": lambda: step_seconds(other, None, size, False)[0],
        },
        repeats,
    )

    def slowdown(way: str) -> float:
        return statistics.median(a / b for a, b in zip(found[way], found["alone"], strict=True)) - 1

    shares = [speed * alone for speed, alone in zip(others, found["other alone"], strict=True)]
    return {
        "guaranteed": first,
        "opportunistic": other,
        "slowdown_unthrottled": slowdown("beside"),
        "slowdown": slowdown("managed"),
        "opportunistic_share": statistics.median(shares),
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
        middle = [statistics.median(one[place] for one in found) for place in (0, 1)]
        a, b = (None if seconds == float("inf") else seconds for seconds in middle)
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
    options = arguments(__doc__ or "", repeats=3)
    torch.set_num_threads(1)
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
