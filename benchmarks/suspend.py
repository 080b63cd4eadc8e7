"""Jobs that rest: suspended in memory, written to disk and read again, taking turns.

    python -m benchmarks.suspend --json

ResNet-50 with its optimizer's momentum, against `torch.save` and `torch.load` of the same state.
Medians of interleaved runs, in seconds. All of them end with the bytes on the disk: `torch.save` is
followed by an fsync, a checkpoint fsyncs itself; and a checkpoint's bytes are hashed on both ways.

`checkpoint_s` is a snapshot and its file, of which `snapshot_s` is what the job waits for; the rest
happens beside training. `restore_s` reads, checks and gives the state to the job.

`suspend_ms` is from the end of a step of ResNet-50 until its memory is free, `resume_ms` from
the call until it runs again, `first_step_ms` by how much its first step then takes longer than
usual. `shares` are the shares of the time in memory of six equal jobs in room for four (4/6 is
fair). `turn_ms` is for how long no lane works when a turn ends, copies included;
`time_slice_loss` is how much less of the time lanes are at work than with room for all six, the
median over windows, `time_slice_loss_error` the standard error of their mean, and
`time_slice_fewer_steps` the same of the steps that they make, which a shared machine changes more
than turns do.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import waterflow as wf
from benchmarks.common import arguments, interleaved, show
from waterflow.checkpoint.cursor import DataCursor
from waterflow.checkpoint.job_state import Progress, check, put, take
from waterflow.checkpoint.model import attributes_of
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.engine.events import GroupsRan, MemoryMoved, StateChanged, StepDone
from waterflow.engine.states import JobState
from waterflow.executor.run.rng import JobRng
from waterflow.job.epochs import begin_epoch
from waterflow.models.zoo import TASKS

BATCH = 2
#: Seconds of a turn; a minute is the engine's own, with a sixtieth of the changes.
QUANTUM = 1.0


def trained(name: str) -> wf.Job:
    """A model of the zoo's, after a step, so that its optimizer has state."""
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    job = wf.Job(name, model, optimizer, task.loss, [task.batch(BATCH)], steps=1, seed=0)
    wf.run_eager(job)
    return job


@dataclass
class Case:
    """A job, and a folder for its state."""

    job: wf.Job
    folder: Path

    def snapshot(self) -> JobSnapshot:
        position = DataCursor(self.job, JobRng(0), begin_epoch).position(1, 0, 1, 0.0)
        before = attributes_of(self.job.model)
        return take(self.job, Progress(0, position, [0.0], 0), before)

    def checkpoint(self) -> None:
        CheckpointFolder(self.folder).write(self.snapshot())

    def restore(self) -> None:
        found = CheckpointFolder(self.folder).read(self.job.name)
        assert found is not None
        check(self.job, found)
        put(self.job, found)

    def torch_save(self) -> None:
        state = {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}
        with open(self.folder / "saved.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        state: Any = torch.load(self.folder / "saved.pt", weights_only=True)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])


@contextmanager
def case(name: str) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        yield Case(trained(name), Path(folder))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return measure


def measure(made: Case, repeats: int) -> dict[str, object]:
    found = interleaved(
        {
            "snapshot_s": timed(made.snapshot),
            "checkpoint_s": timed(made.checkpoint),
            "restore_s": timed(made.restore),
            "torch_save_s": timed(made.torch_save),
            "torch_load_s": timed(made.torch_load),
        },
        repeats,
    )
    medians: dict[str, object] = {key: statistics.median(times) for key, times in found.items()}
    return {**medians, "checkpoint_bytes": made.snapshot().nbytes}


class Rests:
    """Suspends and resumes a running job at the ends of steps, and takes the times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.handle: wf.JobHandle | None = None
        self.suspends: list[float] = []
        self.resumes: list[float] = []
        self.steps: list[float] = []
        self.first_steps: list[float] = []
        self.done = threading.Event()
        self._asked = self._latest = time.perf_counter()
        self._is_first = False

    def on_step(self, result: wf.StepResult) -> None:
        now = time.perf_counter()
        if result.step > 3:
            (self.first_steps if self._is_first else self.steps).append(now - self._latest)
        self._is_first = False
        if result.step > 3 and result.step % 4 == 0 and self.handle is not None:
            if len(self.resumes) >= self.times:
                self.done.set()
                return
            self._asked = time.perf_counter()
            self.handle.suspend()
        self._latest = time.perf_counter()

    def __call__(self, event: Any) -> None:
        if not isinstance(event, StateChanged) or self.handle is None:
            return
        now = time.perf_counter()
        if event.after is JobState.SUSPENDED:
            self.suspends.append(now - self._asked)
            threading.Thread(target=self._resume).start()
        elif event.before is JobState.RESUMING:
            self.resumes.append(now - self._asked)
            self._is_first, self._latest = True, now

    def _resume(self) -> None:
        assert self.handle is not None
        self._asked = time.perf_counter()
        self.handle.resume()


def rests(times: int) -> dict[str, object]:
    """What it takes a running ResNet-50 to rest and to go on, in milliseconds."""
    task = TASKS["resnet50"]
    torch.manual_seed(0)
    model, rests = task.model(), Rests(times)
    optimizer = task.optimizer(model.parameters())
    data = [task.batch(BATCH)]
    job = wf.Job("r", model, optimizer, task.loss, data, steps=10**6, seed=0, capture=True)
    job.on_step = rests.on_step
    with wf.Engine("8GiB", threads=1) as engine:
        engine.subscribe(rests)
        rests.handle = engine.submit(job)
        rests.done.wait()
        engine.stop_all()
    usual = statistics.median(rests.steps)
    return {
        "suspend_ms": 1e3 * statistics.median(rests.suspends),
        "resume_ms": 1e3 * statistics.median(rests.resumes),
        "first_step_ms": 1e3 * (statistics.median(rests.first_steps) - usual),
    }


def equal_jobs(count: int) -> list[wf.Job]:
    """Perceptrons whose parameters and momentum are most of what they need."""
    jobs = []
    for number in range(count):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        data = [torch.randn(16, 512) for _ in range(8)]
        jobs.append(
            wf.Job(
                f"job {number}",
                *(model, optimizer, lambda m, b: m(b).square().mean(), data),
                steps=10**9,
                seed=0,
                capture=True,
            )
        )
    return jobs


class Shares:
    """The seconds that each job has been in memory, those that lanes have worked, the steps made,
    and the seconds of each change of turns in which no lane has worked; subscribes to events."""

    def __init__(self) -> None:
        self.worked, self.steps = 0.0, 0
        self.changes: list[float] = []
        self._latest = 0.0  # end of a group
        self._ended: float | None = None  # the present change began then
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def __call__(self, event: Any) -> None:
        if isinstance(event, GroupsRan):
            if self._ended is not None:
                self.changes.append(min(start for *_, start, _ in event.spans) - self._ended)
                self._ended = None
            self.worked += sum(stop - start for *_, start, stop in event.spans)
            self._latest = max(self._latest, *(stop for *_, stop in event.spans))
        elif isinstance(event, StepDone):
            self.steps += 1
        elif not isinstance(event, MemoryMoved):
            return
        elif event.held:
            self._since.setdefault(event.job, time.perf_counter())
        elif event.job in self._since:
            self._ended = self._latest
            self._add(event.job, self._since.pop(event.job))

    def _add(self, job: str, since: float) -> None:
        seconds = self._seconds.get(job, 0.0)
        self._seconds[job] = seconds + time.perf_counter() - since

    def so_far(self) -> dict[str, float]:
        for job in list(self._since):
            since, self._since[job] = self._since[job], time.perf_counter()
            self._add(job, since)
        return dict(self._seconds)


def room_for(count: int) -> int:
    """Bytes in which so many of the jobs fit, and no more."""
    (job,) = equal_jobs(1)
    job.steps = 3
    need = wf.run([job], memory="1GiB", threads=1).jobs[job.name]
    assert need.persistent_bytes is not None
    assert need.solo_peak_bytes is not None
    step = need.solo_peak_bytes - need.persistent_bytes
    return int(need.persistent_bytes * (count + 0.5) + step)


class Window(NamedTuple):
    """What six jobs did under one budget: lanes at work on the average, steps a second of all, and
    each one's share of the time in memory."""

    at_work: float
    speed: float
    shares: list[float]


def window(engine: wf.Engine, held: Shares, budget: int, seconds: float) -> Window:
    """Changes the budget; the first half second counts for the shares alone."""
    engine.resize(budget)
    shares, begun = held.so_far(), time.perf_counter()
    time.sleep(0.5)
    worked, steps, started = held.worked, held.steps, time.perf_counter()
    time.sleep(seconds)
    worked, steps, ended = held.worked - worked, held.steps - steps, time.perf_counter()
    after = held.so_far()
    return Window(
        worked / (ended - started),
        steps / (ended - started),
        [(after[name] - shares.get(name, 0.0)) / (ended - begun) for name in sorted(after)],
    )


def slices(windows: int, seconds: float = 4.0) -> dict[str, object]:
    """Six jobs in room for four, and in room for all, by turns: an engine whose budget changes back
    and forth, as the machine's own speed changes within half a minute.

    Args:
        windows: of each.
        seconds: of a window, of several turns of a second.
    """
    four, six = room_for(4), room_for(6)
    held, found = Shares(), dict[int, list[Window]]({four: [], six: []})
    with wf.Engine(six, policy="time-slice", threads=1, quantum=QUANTUM) as engine:
        engine.subscribe(held)
        handles = [engine.submit(job) for job in equal_jobs(6)]
        while min(len(handle.losses) for handle in handles) < 50:  # captured, all of them
            time.sleep(0.02)
        for number in range(windows):
            for budget in (four, six) if number % 2 else (six, four):
                found[budget].append(window(engine, held, budget, seconds))
        engine.stop_all()
    pairs = list(zip(found[four], found[six], strict=True))
    at_work = [sliced.at_work / all_in.at_work for sliced, all_in in pairs]
    shares = zip(*(sliced.shares for sliced, _ in pairs), strict=True)
    return {
        "shares": [statistics.fmean(of_job) for of_job in shares],
        "quantum_s": QUANTUM,
        "turn_ms": 1e3 * statistics.median(held.changes),
        "time_slice_loss": 1 - statistics.median(at_work),
        "time_slice_loss_error": statistics.stdev(at_work) / windows**0.5,
        "time_slice_fewer_steps": 1 - statistics.median(a.speed / b.speed for a, b in pairs),
    }


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    with case("resnet50") as made:
        found = measure(made, options.repeats)
    resting = rests(2 * options.repeats)
    show({**found, **resting, **slices(4 * options.repeats)}, options.json)


if __name__ == "__main__":
    main()
