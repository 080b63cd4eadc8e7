"""Who may begin: jobs that two engines would train at the same time may not."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.data import cross_entropy, pairs
from waterflow.common.errors import JobError

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

MEMORY = "64MiB"
STEPS = 6


class Student(nn.Module):
    """It learns from what another network says, which it may hold, too."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher
        self.own = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(inputs) + self.teacher(inputs).detach()


def make_job(name: str, model: nn.Module, trained: nn.Module, **options: Any) -> wf.Job:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    data = {"data": pairs(), "steps": STEPS, **options}
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **data)


class Held:
    """A job that waits behind its second step, in an engine of its own, while this is entered."""

    def __init__(self, model: nn.Module, trained: nn.Module) -> None:
        self._under_way, self._released = threading.Event(), threading.Event()

        def hold(step: Any) -> None:
            if step.step == 2:
                self._under_way.set()
                assert self._released.wait(60)

        self.job = make_job("held", model, trained, on_step=hold)
        self._engine = wf.Engine(memory=MEMORY)

    def __enter__(self) -> wf.Job:
        self._engine.__enter__()
        self._handle = self._engine.submit(self.job)
        assert self._under_way.wait(60)
        return self.job

    def __exit__(self, *error: Any) -> None:
        self._released.set()
        report = self._handle.result()
        self._engine.__exit__(*error)
        assert report.error is None
        assert report.steps == STEPS


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def losses(job: wf.Job) -> list[float]:
    report = wf.run([job], memory=MEMORY)
    assert report.ok, report.jobs[job.name].error
    return list(report.jobs[job.name].losses)


def sharing(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Models that share a tensor with one that is trained, and what of them is trained."""
    tied = nn.Sequential(network())
    tied[0].weight = model.weight
    student = Student(model)
    return {"trained": (model, model), "tied": (tied, tied), "read": (student, student.own)}


@pytest.mark.parametrize("how", sharing(network()))
def test_what_another_engine_trains_is_refused(how):
    model = network()
    with Held(model, model):
        job = make_job("late", *sharing(model)[how])
        with pytest.raises(JobError, match="'held', which another engine runs now, share a"):
            wf.run([job], memory=MEMORY).raise_errors()
    losses(make_job("later", *sharing(model)[how]))  # it has ended


def test_the_job_under_way_is_not_touched():
    model, alone = network(), network()
    expected = losses(make_job("alone", alone, alone))
    with Held(model, model) as job:
        again = wf.run([job], memory=MEMORY)
        assert isinstance(again.jobs["held"].error, str)
    assert torch.equal(model.weight, alone.weight)
    assert len(expected) == STEPS


def test_what_both_only_read_may_be_shared():
    teacher = network()
    one, other, alone = (Student(teacher) for _ in range(3))
    for each in (other, alone):
        each.own = copy.deepcopy(one.own)
    expected = losses(make_job("alone", alone, alone.own))
    with Held(one, one.own):
        assert losses(make_job("beside", other, other.own)) == expected


def test_engines_of_the_process_that_forked_do_not_count():
    model = network()
    results = multiprocessing.get_context("fork").SimpleQueue()

    def train() -> None:
        try:
            network()(torch.zeros(1, 4)).sum().backward()
        except RuntimeError as refusal:  # torch's, where it is built for CUDA
            results.put(str(refusal))
        else:
            results.put(losses(make_job("child", model, model)))

    with Held(model, model):
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join(120)
        assert child.exitcode == 0
    found = results.get()
    if isinstance(found, str):
        pytest.skip(found)
    assert len(found) == STEPS
