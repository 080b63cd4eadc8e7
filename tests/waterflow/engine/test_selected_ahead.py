"""Batches that torch's loaders select from tensors are selected ahead beside callbacks that plainly
leave these tensors alone; whatever a callback does, each job has the numbers of its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import waterflow as wf
from waterflow.executor.data.feeder import Feeder

pytestmark = pytest.mark.cpu

EPOCHS, SAMPLES, BATCH = 4, 60, 6


class Given:
    """What a job is made of, and what its callback can reach."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.images, self.labels = torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % 3
        self.array = self.images.numpy()
        self.order = list(range(SAMPLES - 6))
        dataset = Subset(TensorDataset(self.images, self.labels), self.order)
        self.loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def job(self, on_step: Callable[[Any], Any]) -> wf.Job:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(model(batch[0]), batch[1])

        optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        parts = {"optimizer": optimizer, "loss": loss, "data": self.loader}
        return wf.Job(
            *("job",),
            model=self.model,
            epochs=EPOCHS,
            seed=1,
            capture=True,
            on_step=on_step,
            **parts,
        )


def noting(given: Given) -> Callable[[Any], Any]:
    notes: list[float] = []
    return lambda step: notes.append(step.loss)


def evaluating(given: Given) -> Callable[[Any], Any]:
    images, model, found = given.images, given.model, set[float]()

    def on_step(step: Any) -> None:
        model.eval()
        with torch.no_grad():
            found.add(model(images).sum().item())
        model.train()

    return on_step


def drawing(given: Given) -> Callable[[Any], Any]:
    return lambda step: wf.STOP if torch.randperm(4)[0] > 5 else None


def stopping(given: Given) -> Callable[[Any], Any]:
    return lambda step: wf.STOP if step.step == 17 else None


def going_through_the_loader(given: Given) -> Callable[[Any], Any]:
    loader = given.loader
    return lambda step: wf.STOP if sum(labels.sum().item() for _, labels in loader) < 0 else None


AHEAD = [noting, evaluating, drawing, stopping, going_through_the_loader]


def scaling(given: Given) -> Callable[[Any], Any]:
    images = given.images

    def on_step(step: Any) -> None:
        images.mul_(0.9)

    return on_step


def scaling_what_it_is_given(given: Given) -> Callable[[Any], Any]:
    images = given.images

    def scale(some: torch.Tensor) -> None:
        some.mul_(0.9)

    return lambda step: scale(images)


def writing_to_the_array(given: Given) -> Callable[[Any], Any]:
    array = given.array

    def on_step(step: Any) -> None:
        array[step.step % SAMPLES] = 0.5

    return on_step


def writing_by_a_function(given: Given) -> Callable[[Any], Any]:
    array = given.array

    def on_step(step: Any) -> None:
        np.negative(array, array)

    return on_step


def clipping(given: Given) -> Callable[[Any], Any]:
    images = given.images

    def on_step(step: Any) -> None:
        functional.relu(images, inplace=True)

    return on_step


def clipping_by_a_layer(given: Given) -> Callable[[Any], Any]:
    images, clip = given.images, nn.ReLU(inplace=True)

    def on_step(step: Any) -> None:
        clip(images)

    return on_step


def reordering(given: Given) -> Callable[[Any], Any]:
    order = given.order

    def on_step(step: Any) -> None:
        order.reverse()

    return on_step


def exchanging(given: Given) -> Callable[[Any], Any]:
    dataset, others = given.loader.dataset.dataset, torch.zeros(SAMPLES, 5)  # type: ignore[attr-defined]

    def on_step(step: Any) -> None:
        dataset.tensors = (others, dataset.tensors[1])

    return on_step


IN_TURN = [
    *(scaling, scaling_what_it_is_given, writing_to_the_array, writing_by_a_function, clipping),
    *(clipping_by_a_layer, reordering, exchanging),
]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches were selected ahead, each time."""
    counts: list[int] = []
    fetch = Feeder.fetch_undrawn

    def counted(self: Feeder[Any], count: int) -> None:
        counts.append(count)
        fetch(self, count)

    monkeypatch.setattr(Feeder, "fetch_undrawn", counted)
    return counts


def losses(make: Callable[[Given], Callable[[Any], Any]]) -> tuple[list[float], list[float]]:
    """Those of the loop, and of waterflow."""
    given = Given()
    expected = wf.run_eager(given.job(make(given)), threads=1).losses
    given = Given()
    report = wf.run([given.job(make(given))], "64MiB", threads=1)
    report.raise_errors()
    return expected, report["job"].losses


@pytest.mark.parametrize("make", AHEAD, ids=lambda make: make.__name__)
def test_beside_callbacks_that_leave_the_data_alone(make: Any, ahead: list[int]) -> None:
    expected, found = losses(make)
    assert found == expected
    assert any(count > 1 for count in ahead)


@pytest.mark.parametrize("make", IN_TURN, ids=lambda make: make.__name__)
def test_not_beside_callbacks_that_may_change_them(make: Any, ahead: list[int]) -> None:
    expected, found = losses(make)
    assert found == expected
    assert not ahead


def test_a_change_that_no_code_tells_of_ends_the_job() -> None:
    given = Given()
    images = given.images

    def on_step(step: Any) -> None:
        functional.relu(images, True)

    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([given.job(on_step)], "64MiB", threads=1)
    error = report["job"].error
    assert error is not None
    assert "'job'" in error
    assert "inplace=True" in error
    assert "capture=False" in error
