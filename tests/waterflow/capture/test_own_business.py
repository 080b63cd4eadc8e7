"""Which callbacks have nothing to do with anything but the step that they are given."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from waterflow.capture.own_business import OwnBusiness

pytestmark = pytest.mark.cpu

IMAGES, LABELS = torch.randn(6, 4), torch.arange(6) % 3
ARRAY = np.zeros(3)
TABLE: dict[str, float] = {}
TOTAL = 0.0

Callback = Callable[[Any], Any]


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)


METER = Meter()


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(IMAGES).argmax(1) == LABELS).float().mean().item()
    model.train()
    return right


def noting() -> Callback:
    notes: list[float] = []

    def keep(value: float) -> None:
        notes.append(value)

    def on_step(step: Any) -> None:
        if step.step % 2 == 0:
            keep(accuracy(step.model))

    return on_step


def best() -> Callback:
    found: dict[str, float] = {}

    def on_step(step: Any) -> None:
        with torch.inference_mode():
            loss = functional.cross_entropy(step.model(IMAGES), LABELS).item()
        found["best"] = min(found.get("best", math.inf), loss)

    return on_step


def seen() -> Callback:
    epochs: set[int] = set()
    return lambda step: epochs.add(step.epoch)


def with_arrays() -> Callback:
    return lambda step: float(np.mean(ARRAY)) > 1


def over_a_loader(workers: int = 0) -> Callback:
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=3, num_workers=workers)
    return lambda step: max(images.sum().item() for images, _ in loader) > 1


def with_a_layer() -> Callback:
    layer = nn.Linear(4, 2)
    return lambda step: layer(IMAGES).sum().item() > math.pi


def stopping() -> Callback:
    def on_step(step: Any) -> Any:
        if step.loss != step.loss:
            raise ValueError("no number")
        return wf.STOP if step.loss > 10 else None

    return on_step


OWN = [stopping, noting, best, seen, with_arrays, with_a_layer, over_a_loader]


@pytest.mark.parametrize("make", OWN, ids=lambda make: make.__name__)
def test_these_are_nobody_elses_affair(make: Callable[[], Callback]) -> None:
    callbacks = make(), make()
    one, other = (OwnBusiness.of(callback, nn.Linear(4, 3)) for callback in callbacks)
    assert one is not None
    assert other is not None
    assert one.is_beside(other)
    assert other.is_beside(one)


def prints(step: Any) -> None:
    print(step.loss)


def writes(step: Any) -> None:
    with open("losses", "a") as file:
        file.write(str(step.loss))


def saves(step: Any) -> None:
    torch.save(step.model.state_dict(), "best.pt")


def sets_threads(step: Any) -> None:
    torch.set_num_threads(1)


def casts(step: Any) -> None:
    with torch.autocast("cpu"):
        step.model(IMAGES)


def looks_at_the_environment(step: Any) -> Any:
    return os.environ.get("STOP")


def dumps(step: Any) -> str:
    return json.dumps({"loss": step.loss})


def draws(step: Any) -> float:
    return random.random()


def changes_a_module_variable(step: Any) -> None:
    global TOTAL
    TOTAL += step.loss


def changes_an_array(step: Any) -> None:
    ARRAY[0] = step.loss


def changes_a_tensor(step: Any) -> None:
    IMAGES.mul_(2)


def hands_a_tensor_on(step: Any) -> None:
    def scale(images: torch.Tensor) -> None:
        images.mul_(0.5)

    scale(IMAGES)


def has_an_object(step: Any) -> None:
    METER.update(step.loss)


def imports(step: Any) -> None:
    import csv

    csv.writer(step)


def sets_an_attribute(step: Any) -> None:
    step.model.latest = step.loss


def sets_by_name(step: Any) -> None:
    setattr(step.model, "latest", step.loss)  # noqa: B010


def seeds(step: Any) -> None:
    torch.manual_seed(0)


def of_a_name_that_is_an_attribute_too(step: Any) -> None:
    step.TABLE.update(loss=1.0)
    TABLE["loss"] = step.loss


def counted() -> Callback:
    count = 0

    def on_step(step: Any) -> None:
        nonlocal count
        count += 1

    return on_step


def added_to() -> Callback:
    totals = [0.0]

    def on_step(step: Any) -> None:
        nonlocal totals
        totals += [step.loss]

    return on_step


def below() -> Callback:
    lists: dict[str, list[float]] = {"a": []}

    def on_step(step: Any) -> None:
        lists["a"].append(step.loss)

    return on_step


def shadowing() -> Callback:
    notes: list[float] = []

    def on_step(step: Any) -> None:
        def first() -> None:
            notes = METER.values

            def second() -> None:
                notes.append(1.0)

            second()

        notes.append(2.0)
        first()

    return on_step


def handed_on() -> Callback:
    notes: list[float] = []

    def add(to: list[float], value: float) -> None:
        to.append(value)

    return lambda step: add(notes, step.loss)


OTHERS: list[Callback] = [
    *(prints, writes, saves, sets_threads, casts, looks_at_the_environment, dumps, draws),
    *(changes_a_module_variable, changes_an_array, changes_a_tensor, hands_a_tensor_on),
    *(has_an_object, imports, sets_an_attribute, sets_by_name, seeds),
    *(of_a_name_that_is_an_attribute_too, METER.update, functools.partial(print, "step")),
    *(counted(), added_to(), below(), shadowing(), handed_on(), over_a_loader(workers=1)),
]


@pytest.mark.parametrize(
    "callback", OTHERS, ids=lambda one: getattr(one, "__qualname__", "partial")
)
def test_these_may_be_somebody_elses_affair(callback: Callback) -> None:
    assert OwnBusiness.of(callback, nn.Linear(4, 3)) is None


def test_who_notes_in_the_same_container_has_it_in_common() -> None:
    notes: list[float] = []

    def adding() -> Callback:
        return lambda step: notes.append(step.loss)

    def reading() -> Callback:
        return lambda step: len(notes) > 3

    callbacks = adding(), adding(), reading()
    one, other, reader = (OwnBusiness.of(callback, nn.Linear(4, 3)) for callback in callbacks)
    assert one is not None
    assert other is not None
    assert reader is not None
    assert not one.is_beside(other)
    assert not one.is_beside(reader)
    assert not reader.is_beside(one)
    assert reader.is_beside(reader)


def test_a_module_variable_is_in_common() -> None:
    def note(step: Any) -> None:
        TABLE["loss"] = step.loss

    def look(step: Any) -> Any:
        return TABLE.get("loss", 0.0) + time.perf_counter() > 1

    one, other = (OwnBusiness.of(callback, nn.Linear(4, 3)) for callback in (note, look))
    assert one is not None
    assert other is not None
    assert not one.is_beside(other)


class Plain(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.sizes = [4, 3]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.helped(images) * self.scale

    def helped(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layer(images))

    @property
    def width(self) -> int:
        return self.sizes[0]

    @staticmethod
    def loss(found: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(found, LABELS)


class Above(Plain):
    def helped(self, images: torch.Tensor) -> torch.Tensor:
        return super().helped(images) + 1


class Counting(Plain):
    def helped(self, images: torch.Tensor) -> torch.Tensor:
        self.calls = images.shape[0]
        return super().helped(images)


class Printing(Plain):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        print(images.shape)
        return super().forward(images)


class InPlace(Plain):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.mul_(2))


class Measuring(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.meter = METER


class Classy(Plain):
    made: ClassVar[list[int]] = []

    @classmethod
    def note(cls) -> None:
        cls.made.append(1)


class AboveCounting(Counting):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images)


def hooked() -> nn.Module:
    model = Plain()
    model.register_forward_hook(lambda module, given, found: METER.update(1.0))
    return model


def in_place_by_a_layer() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))


class InPlaceByName(Plain):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.relu(images, inplace=True))


@pytest.mark.parametrize("kind", [Plain, Above])
def test_a_model_of_ones_own_may_be_plain(kind: type[Plain]) -> None:
    callback, model = noting(), kind()
    own = OwnBusiness.of(callback, model)
    assert own is not None
    assert id(model.layer.weight) in own.reached


@pytest.mark.parametrize(
    "make",
    [
        Counting,
        Printing,
        InPlace,
        Measuring,
        Classy,
        AboveCounting,
        hooked,
        in_place_by_a_layer,
        InPlaceByName,
    ],
)
def test_a_model_that_does_more_may_be_somebody_elses_affair(make: Callable[[], nn.Module]) -> None:
    assert OwnBusiness.of(noting(), make()) is None
