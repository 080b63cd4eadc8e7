"""Jobs that have a Python object in common, which one of them may change while it trains."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf

IMAGES = torch.linspace(-1, 1, 64).reshape(8, 8)
LABELS = torch.arange(8) % 3
NOTES: dict[str, Any] = {}
COUNT = 0


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def job(**given: Any) -> wf.Job:
    model = given.pop("model", None) or nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)
    given = {"loss": plain_loss, "data": data, "optimizer": optimizer, "steps": 2, **given}
    return wf.Job("job", model=model, **given)


class Metric:
    def __init__(self) -> None:
        self.right = self.seen = 0

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, found: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += int((found.argmax(1) == labels).sum())
        self.seen += len(labels)


def evaluation(metric: Metric) -> dict[str, Any]:
    def evaluate(model: nn.Module) -> float:
        metric.reset()
        metric.update(model(IMAGES), LABELS)
        return metric.right / metric.seen

    return {"evaluate": evaluate}


class Criterion:
    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.last = model(batch[0])
        return functional.cross_entropy(self.last, batch[1])


class Center(nn.Module):
    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found = model(batch[0])
        with torch.no_grad():
            self.center.mul_(0.9).add_(found.mean(0))
        return functional.cross_entropy(found - self.center, batch[1])


def hooked(notes: dict[str, Any]) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda module, inputs, output: notes.update(x=output))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) + notes["x"].mean()

    return {"model": model, "loss": loss}


class Reading(Dataset[Any]):
    """One that keeps something: a cache, a buffer, a stream of its own, a place in a file."""

    def __init__(self, how: str) -> None:
        self.how = READS[how]
        self.cache, self.served = dict[int, Any](), 0
        self.buffer = torch.empty(8)
        self.random, self.drawn = np.random.default_rng(0), random.Random(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return self.how(self, place), LABELS[place]

    def get_cached(self, place: int) -> Any:
        return self.cache.setdefault(place, IMAGES[place] * 2)

    def get_counted(self, place: int) -> Any:
        self.served += 1
        return IMAGES[place] * self.served

    def get_buffered(self, place: int) -> Any:
        self.buffer[:] = IMAGES[place]
        return self.buffer.clone()

    def get_noisy(self, place: int) -> Any:
        return IMAGES[place] + float(self.random.standard_normal())

    def get_drawn(self, place: int) -> Any:
        return IMAGES[place] * self.drawn.random()


READS = {
    "cached": Reading.get_cached,
    "counted": Reading.get_counted,
    "buffered": Reading.get_buffered,
    "noisy": Reading.get_noisy,
    "drawn": Reading.get_drawn,
}


class OfClass(nn.Module):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        type(self).steps += 1
        return self.inner(x) * self.steps


class OwnNotes(nn.Module):
    """Notes of its own, as many models have."""

    def __init__(self, frozen: nn.Module | None = None) -> None:
        super().__init__()
        self.frozen = frozen or nn.Linear(8, 8).requires_grad_(False)
        self.inner = nn.Linear(8, 3)
        self.outputs: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.features = self.frozen(x)
        self.outputs.append(self.features.shape)
        x = self.features + 0
        x += 1
        return self.inner(x)


def counting_globally(model: nn.Module, batch: Any) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return plain_loss(model, batch) * COUNT


def with_default(model: nn.Module, batch: Any, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    seen.append(1)
    return plain_loss(model, batch) * len(seen)


def counting() -> Callable[..., torch.Tensor]:
    steps = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return plain_loss(model, batch) * steps

    return loss


def scaled(settings: Any) -> Callable[..., torch.Tensor]:
    return lambda model, batch: plain_loss(model, batch) * settings.scale


def weighted(weights: Any) -> Callable[..., torch.Tensor]:
    return lambda model, batch: plain_loss(model, batch) * float(weights[0])


def noting(model: nn.Module, batch: Any) -> torch.Tensor:
    found = plain_loss(model, (batch["x"], batch["y"]))
    batch["loss"] = float(found.detach())
    return found


def stepping(function: Callable[[], float]) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) * float(function())

    return loss


class Locked:
    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0

    def __call__(self) -> int:
        with self.lock:
            self.count += 1
            return self.count


def sharing(kind: str) -> Callable[[], dict[str, Any]]:
    """Makes what a job of a kind is made of, from one object for all of them."""
    if kind == "metric":
        return functools.partial(evaluation, Metric())
    if kind == "hook":
        return functools.partial(hooked, {})
    if kind.startswith("dataset "):
        data = Reading(kind.removeprefix("dataset "))
        return lambda: {"data": DataLoader(data, batch_size=4)}
    if kind == "collate":
        buffer = torch.empty(4, 8)

        def collate(items: list[Any]) -> Any:
            for place, (image, _) in enumerate(items):
                buffer[place] = image
            return buffer.clone(), torch.stack([label for _, label in items])

        made = TensorDataset(IMAGES, LABELS)
        return lambda: {"data": DataLoader(made, batch_size=4, collate_fn=collate)}
    if kind == "batches":
        batches = [{"x": IMAGES, "y": LABELS}]
        return lambda: {"data": batches, "loss": noting}
    if kind == "scheduler":
        seen: list[int] = []

        def rate(step: int) -> float:
            seen.append(step)
            return 1 / len(seen)

        return lambda: scheduled(rate)
    if kind == "curriculum":
        settings = types.SimpleNamespace(scale=1.0)

        def on_step(result: wf.StepResult) -> None:
            settings.scale *= 0.9

        return lambda: {"loss": scaled(settings), "on_step": on_step}
    if kind == "file":
        return functools.partial(from_file, open(__file__, "rb"))
    found = {
        "criterion": Criterion(),
        "module": Center(),
        "global": counting_globally,
        "default": with_default,
        "closure": counting(),
        "iterator": weighted_by(itertools.count(1)),
        "generator of tensors": drawing(torch.Generator()),
        "array": filling(np.ones(4)),
        "deque": rotating(collections.deque([1.0, 2.0])),
        "dictionary": noting_in({}),
    }[kind]
    return lambda: {"loss": found}


def scheduled(rate: Callable[[int], float]) -> dict[str, Any]:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def from_file(file: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        file.seek(3)
        return plain_loss(model, batch) * file.read(1)[0]

    return {"loss": loss}


def weighted_by(numbers: Iterator[int]) -> Callable[..., torch.Tensor]:
    return lambda model, batch: plain_loss(model, batch) * next(numbers)


def drawing(source: torch.Generator) -> Callable[..., torch.Tensor]:
    return lambda m, batch: plain_loss(m, batch) * torch.rand((), generator=source)


def filling(values: Any) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        values[1:] = values[:-1]
        return plain_loss(model, batch) * float(values.sum())

    return loss


def rotating(values: Any) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        values.rotate(1)
        return plain_loss(model, batch) * values[0]

    return loss


def noting_in(notes: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        notes["x"] = model(batch[0])
        return functional.cross_entropy(notes["x"], batch[1])

    return loss


class _Answering(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(f"somebody asks for {name}")


class OfItsOwn:
    """An object that answers itself what Python asks it for its attributes."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("somebody asks for attributes")


def answering_class() -> Any:
    """A class that does so, whatever it is asked for."""
    return _Answering("Answering", (), {})


SHARED = (
    *("metric", "criterion", "module", "hook", "collate", "batches", "global", "default"),
    *("closure", "iterator", "generator of tensors", "array", "deque", "scheduler", "curriculum"),
    *("dataset cached", "dataset counted", "dataset buffered", "dataset noisy", "dataset drawn"),
    *("file", "dictionary"),
)
