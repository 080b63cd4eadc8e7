"""Whether objects of a class can be changed in some way."""

from __future__ import annotations

import contextvars
import queue
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.account.changeable import (
    Way,
    has_attribute,
    is_looked_after,
    may_be_changed,
    memory_of,
    moved_by_use,
)
from waterflow.account.origins import Origin

HELD, UNKNOWN = Origin("held", "found"), Origin("unknown")


class Mine(list[int]):
    """A list with a method of its own."""

    def append(self, item: int) -> None:
        raise NotImplementedError


class Slotted:
    __slots__ = ("count",)


@pytest.mark.parametrize(
    ("kind", "how", "name", "may"),
    [
        (list, "method", "append", True),
        (dict, "method", "append", False),
        (OrderedDict, "item", "", True),
        (tuple, "item", "", False),
        (deque, "method", "rotate", True),
        (set, "operator", "|=", True),
        (int, "operator", "+=", False),
        (Mine, "method", "append", False),  # its code is looked at by itself
        (Mine, "method", "extend", True),
        (list, "attribute", "count", False),
        (Mine, "attribute", "count", True),
        (Slotted, "attribute", "count", True),
        (types.SimpleNamespace, "attribute", "count", True),
        (torch.Tensor, "method", "mul_", True),
        (torch.Tensor, "method", "add", False),
        (torch.Tensor, "item", "", True),
        (nn.Parameter, "method", "copy_", True),
        (np.ndarray, "method", "fill", True),
        (np.ndarray, "method", "copyto", False),
        (random.Random, "method", "gauss", True),
        (np.random.Generator, "method", "normal", True),
        (torch.Generator, "method", "generator", True),
        (list, "method", "generator", False),
        (list, "method", "out", True),
        (bytearray, "method", "out", True),
        (contextvars.ContextVar, "method", "set", False),  # each job has a context of its own
        (torch.Generator, "method", "manual_seed", True),
        (nn.Linear, "method", "load_state_dict", True),
    ],
)
def test_it_depends_on_the_class(kind: type, how: str, name: str, may: bool) -> None:
    assert may_be_changed(kind, Way(how, name, None), HELD) is may


def test_tensors_and_functions_that_come_from_nowhere_known_are_left_to_others() -> None:
    assert not may_be_changed(torch.Tensor, Way("method", "mul_", None), UNKNOWN)
    assert may_be_changed(np.ndarray, Way("item", "", None), UNKNOWN)
    attribute = Way("attribute", "count", None)
    assert may_be_changed(types.FunctionType, attribute, HELD)
    assert not may_be_changed(types.FunctionType, attribute, UNKNOWN)


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "looked_after"),
    [(Locked, True), (queue.Queue, False), (list, False), (Slotted, False), (lambda: dict, True)],
)
def test_objects_with_locks_are_left_to_their_makers(
    make: Callable[[], Any], looked_after: bool
) -> None:
    assert is_looked_after(make()) is looked_after


def test_an_attribute_may_be_the_objects_or_its_classs() -> None:
    found = Locked()
    assert has_attribute(found, "lock")
    assert has_attribute(found, "__init__")
    assert has_attribute(found, "*")
    assert not has_attribute(found, "count")


def test_views_are_known_by_their_memory() -> None:
    tensor, array = torch.ones(4), np.ones(4)
    assert [*memory_of(tensor)] == [*memory_of(tensor[1:])]
    assert [*memory_of(array[1:])] == [id(array)]
    assert not [*memory_of([])]
    assert next(iter(memory_of(tensor))) in memory_of(tensor.numpy())


class Counting(nn.BatchNorm1d):
    """Of the user's own, with what torch's writes to."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given)


class Masked(nn.Module):
    """What its own code does to it tells that code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.mask


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (nn.BatchNorm1d(2), 3),
        (nn.BatchNorm1d(2).eval(), 0),
        (nn.BatchNorm1d(2, track_running_stats=False), 0),
        (Counting(2), 3),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), 2),
        (Masked(), 0),
        (nn.Linear(2, 2), 0),
        (torch.ao.quantization.MinMaxObserver().eval(), 3),
        (torch.Generator(), 1),
        (np.random.default_rng(0), 1),
        (random.Random(0), 1),
        (torch.default_generator, 0),
        (random._inst, 0),  # type: ignore[attr-defined]
        ([], 0),
    ],
)
def test_what_is_changed_by_whoever_uses_it(value: Any, count: int) -> None:
    assert len([*moved_by_use(value)]) == count
