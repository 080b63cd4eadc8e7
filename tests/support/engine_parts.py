"""Parts of an engine without its loop: a test's own thread is lane 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from waterflow.engine.context import RunContext
from waterflow.engine.events import Event, EventStream
from waterflow.engine.job_run import JobRun
from waterflow.engine.states import JobState
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run import rng
from waterflow.executor.run.lanes import Lanes
from waterflow.executor.run.residency import Residency
from waterflow.steps.prepared import PreparedBatch
from waterflow.steps.shared_captures import SharedCaptures


def make_job(name: str, width: int = 8, **options: Any) -> wf.Job:
    """A perceptron under plain SGD: no step makes state. A scheduler is given as its factory."""
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    settings = {"data": pairs(), "steps": 4, "seed": 0, **options}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if "scheduler" in settings:
        settings["scheduler"] = settings["scheduler"](optimizer)
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


class Parts:
    """A context whose events are kept, and jobs that are in its arena."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.events: list[Event] = []
        context.events.subscribe(self.events.append)
        self._jobs = 0

    def submit(self, job: wf.Job) -> JobRun:
        """The job, as if it had been submitted; its feeder never starts."""
        context, number = self.context, self._jobs
        self._jobs += 1
        return JobRun(
            number,
            job,
            0,
            context.lanes,
            SharedCaptures(),
            context.events,
            context.wake,
            "off",
        )

    def enter(self, job: wf.Job) -> tuple[JobRun, PreparedBatch]:
        """The job in the arena, and its first batch, whose captured step is checked and bound."""
        run = self.submit(job)
        batch = run.steps.preparer.prepare(next(iter(job.data)))
        run.become(JobState.PREPARING)
        run.become(JobState.RUNNING)
        run.move_in(self.context.residency)
        run.eager.run_apart(self.context.lanes, self.context.residency, batch)
        run.captured.choose(batch, self.context.residency)
        return run, batch


@contextlib.contextmanager
def parts(memory: int = 1 << 22, lanes: int = 1, check: bool = False) -> Iterator[Parts]:
    """Lanes on the host with an arena of `memory` bytes."""
    default = torch.get_num_threads()
    device = HostDevice()
    opened = Lanes(device, memory, lanes, 1, default)
    rng.install()
    try:
        opened.adopt_lane(0)
        opened.commit()
        residency = Residency(opened.arena, device)
        yield Parts(RunContext(opened, residency, EventStream(), check))
    finally:
        rng.uninstall()
        opened.close()
        torch.set_num_threads(default)
