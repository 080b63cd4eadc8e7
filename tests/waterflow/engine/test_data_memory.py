"""Jobs whose data are in the same memory: none sees what another one's Python has written there."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.waiting import wait_until

Batch = Any
ROWS, SIZE = 96, 16


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * 8).reshape(ROWS, 8).sin()


LABELS = torch.arange(ROWS) % 3


def views(x: torch.Tensor) -> list[Batch]:
    return [(x[i : i + SIZE], LABELS[i : i + SIZE]) for i in range(0, ROWS, SIZE)]


class Kept(Dataset[Any]):
    """Gives rows of memory that it keeps; with `batch_size=None`, whole batches."""

    def __init__(self, x: torch.Tensor) -> None:
        self.batches = views(x)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


class Generated:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Batch]:
        yield from views(self.x)


class Large(Kept):
    """Reaches more than anybody looks through."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x)
        self.others = [[number] for number in range(30_000)]


class Records(dict[str, torch.Tensor]):
    """Batches of a class of one's own."""


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": views,
    "tuple": lambda x: tuple(views(x)),
    "dicts": lambda x: [{0: a, 1: b} for a, b in views(x)],
    "lists in a list": lambda x: [[a, b] for a, b in views(x)],
    "own mappings": lambda x: [Records({0: a, 1: b}) for a, b in views(x)],
    "array": lambda x: views(torch.from_numpy(x.numpy())),
    "part of an array": lambda x: views(torch.from_numpy(x.numpy()[:])),
    "loader of batches": lambda x: DataLoader(Kept(x), batch_size=None),
    "loader of batches, large": lambda x: DataLoader(Large(x), batch_size=None),
    "own iterable": Generated,
}
READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": views,
    "loader": lambda x: DataLoader(TensorDataset(x, LABELS), SIZE),
    "own iterable": Generated,
    "shared": lambda x: wf.shared(DataLoader(TensorDataset(x, LABELS), SIZE), seed=0),
}


def entropy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def halving(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].mul_(0.5)
    return entropy(model, batch)


def halving_by_numpy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].numpy()[:] *= np.float32(0.5)
    return entropy(model, batch)


def halving_by_data(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].data *= 0.5
    return entropy(model, batch)


def make_job(name: str, data: Any, loss: Any = entropy, steps: int = 30, **options: Any) -> wf.Job:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wf.Job(name, model, optimizer, data=data, loss=loss, seed=1, steps=steps, **options)


def assert_trained_alone(job: wf.Job, report: wf.JobReport, data: Any) -> None:
    fresh = make_job(job.name, data)
    assert_same_numbers(fresh, wf.run_eager(fresh, threads=1), job, report)


def together(*jobs: wf.Job) -> wf.Report:
    return wf.run(jobs, memory="64MiB", threads=1)


@pytest.mark.parametrize(
    ("reader", "writer"),
    [*(("list", each) for each in WRITERS), *((each, "list") for each in READERS)],
)
def test_nobody_reads_what_another_jobs_step_has_written(reader: str, writer: str) -> None:
    x = images()
    jobs = [
        make_job("reader", READERS[reader](x)),
        make_job("writer", WRITERS[writer](x), halving, capture=False),
    ]
    report = together(*jobs)
    assert_trained_alone(jobs[0], report["reader"], READERS[reader](images()))
    assert "changes its batch in place" in str(report["writer"].error)
    assert torch.equal(x, images())


@pytest.mark.parametrize("loss", [halving, halving_by_numpy, halving_by_data])
@pytest.mark.parametrize("options", [{}, {"capture": False}, {"accumulate": 2}])
def test_however_it_writes(loss: Any, options: dict[str, Any]) -> None:
    data = views(images())
    jobs = [make_job("reader", data), make_job("writer", data, loss, **options)]
    report = together(*jobs)
    assert_trained_alone(jobs[0], report["reader"], views(images()))
    assert "another job has the same tensors as data: give each job its own copy" in str(
        report["writer"].error
    )


def test_a_step_of_ones_own_that_writes() -> None:
    data = views(images())
    writer = make_job("writer", data)
    model, optimizer = writer.model, writer.optimizer

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = halving(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    own = wf.Job("writer", model, optimizer, data=data, step=step, steps=30, seed=1)
    reader = make_job("reader", data)
    report = together(reader, own)
    assert_trained_alone(reader, report["reader"], views(images()))
    assert "changes its batch in place" in str(report["writer"].error)


def test_alone_or_on_copies_a_step_may_write() -> None:
    """The numbers are the loop's, where each epoch finds what the one before has left."""
    data = {name: views(images()) for name in ("a", "b")}
    jobs = [make_job(name, batches, halving) for name, batches in data.items()]
    report = together(*jobs)
    for job in jobs:
        fresh = make_job(job.name, views(images()), halving)
        assert_same_numbers(fresh, wf.run_eager(fresh, threads=1), job, report[job.name])


def test_what_writes_the_same_is_no_change() -> None:
    def clamped(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        batch[0].clamp_(-1, 1)
        return entropy(model, batch)

    data = views(images())
    jobs = [make_job(name, data, clamped) for name in "ab"]
    report = together(*jobs)
    for job in jobs:
        assert_trained_alone(job, report[job.name], views(images()))


def test_a_job_is_refused_whose_data_another_one_is_changing() -> None:
    data = views(images())
    with wf.Engine(memory="64MiB", threads=1) as engine:
        writer = engine.submit(make_job("writer", data, halving, steps=10**9))
        wait_until(lambda: len(writer.losses) >= 3)
        reader = engine.submit(make_job("reader", data))
        error = str(reader.result(timeout=300).error)
        other = engine.submit(make_job("other", views(images())))
        assert other.result(timeout=300).ok, "the labels that both have stay as they are"
        writer.stop()
    assert "'reader' has tensors as data that the steps of job 'writer'" in error
    assert writer.result().state == "stopped"


@pytest.mark.parametrize("how", ["on_step", "evaluate"])
def test_callbacks_that_change_what_another_job_reads_are_no_secret(how: str) -> None:
    data = views(images())

    def spoil(*_: Any) -> dict[str, float]:
        data[0][0].mul_(0.5)
        return {"x": 0.0}

    def on_step(result: wf.StepResult) -> None:
        spoil()

    callback = {"on_step": on_step} if how == "on_step" else {"evaluate": spoil}
    jobs = [make_job("reader", data), make_job("writer", data, **callback)]
    report = together(*jobs)
    assert "were changed in place while another job" in str(report["writer"].error)
    if report["reader"].ok:  # it had ended before
        assert_trained_alone(jobs[0], report["reader"], views(images()))
    else:  # autograd has an error of its own for a step that was under way
        assert re.search("in ?place", str(report["reader"].error))


def test_a_batch_that_cannot_be_copied() -> None:
    class Sealed(list[Any]):
        def __deepcopy__(self, memo: Any) -> None:
            raise TypeError("no copies")

    data = [Sealed(batch) for batch in views(images())]
    jobs = [make_job("reader", data), make_job("writer", copy.copy(data), halving)]
    report = together(*jobs)
    assert report["writer"].error is not None
    assert report["reader"].error is not None


def test_jobs_whose_loaders_make_batches_anew_know_nothing_of_each_other() -> None:
    x = images()
    jobs = [make_job(name, READERS["loader"](x), halving) for name in "ab"]
    report = together(*jobs)
    for job in jobs:
        fresh = make_job(job.name, READERS["loader"](images()), halving)
        assert_same_numbers(fresh, wf.run_eager(fresh, threads=1), job, report[job.name])
