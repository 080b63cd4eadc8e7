"""Equal fingerprints for what makes equal graphs, others for the rest, and doubts."""

import collections
import enum
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.capture.fingerprint import Fingerprint

pytestmark = pytest.mark.cpu

scale = 2.0


def taken(*values):
    fingerprint = Fingerprint()
    for value in values:
        fingerprint.add("value", value)
    return fingerprint


def digest(value):
    found = taken(value)
    assert not found.doubts, found.doubts
    return found.digest()


class Config:
    def __init__(self, **parts):
        vars(self).update(parts)


class Slotted:
    __slots__ = ("left",)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def closing(value):
    return lambda x: x * value


def cyclic(value):
    made = Config(value=value)
    made.me = [made]
    return made


#: Makes a value from a number: equal numbers make equal values.
VALUES = {
    "number": float,
    "attribute": lambda n: Config(n=n),
    "item": lambda n: {"n": [n]},
    "closure": closing,
    "partial": lambda n: functools.partial(max, n),
    "method": lambda n: Config(n=n).__init__,
    "tensor": lambda n: torch.zeros(n),
    "module": lambda n: nn.Linear(n, 1),
    "array": lambda n: np.full(2, n),
    "member": Kind,
    "default": lambda n: eval(f"lambda x={n}: x"),
    "code": lambda n: eval(f"lambda x: x * {n}"),
    "dictionary": lambda n: collections.defaultdict(list, n=n),
    "set": lambda n: {n, "x"},
    "cycle": cyclic,
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_only_have_equal_fingerprints(name):
    make = VALUES[name]
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_values_of_tensors_do_not_count_but_layouts_do():
    assert digest(torch.zeros(2, 3)) == digest(torch.ones(2, 3))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2).T)
    assert digest(torch.zeros(2)) != digest(nn.Parameter(torch.zeros(2)))


def test_what_is_shared_counts():
    one, other = [1], [1]
    assert digest([Config(a=1)] * 2) != digest([Config(a=1), Config(a=1)])
    assert digest((one, one)) == digest((one, other))  # containers stand for what they hold


def reads_global(x):
    return x * scale


def test_globals_that_code_names_count(monkeypatch):
    before = digest(reads_global)
    monkeypatch.setitem(globals(), "unrelated", 1)
    assert digest(reads_global) == before
    monkeypatch.setitem(globals(), "scale", 3.0)
    assert digest(reads_global) != before


def opens(x):
    return open(x)


@pytest.mark.parametrize(
    "value",
    [iter([1]), threading.Lock(), opens, {Config()}, np.array([None]), (n for n in ()), Slotted()],
    ids=["iterator", "lock", "reader", "objects", "array", "generator", "slots"],
)
def test_what_cannot_be_seen_through_is_a_doubt(value):
    assert taken(value).doubts


def patch(self, x):
    return x


def test_functions_put_into_torch_count(monkeypatch):
    def patches():
        fingerprint = Fingerprint()
        fingerprint.add_patches()
        return fingerprint.digest()

    before = patches()
    monkeypatch.setattr(torch.Tensor, "relu", patch)
    assert patches() != before
