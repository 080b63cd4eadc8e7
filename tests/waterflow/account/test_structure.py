"""Structures: equal exactly where no code tells two objects' state apart."""

import array
import collections
import contextvars
import math
import os
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.account.account import Account
from waterflow.account.structure import NoStructureError, Structure

pytestmark = pytest.mark.cpu


def structure_of(value):
    # Not every attribute: libraries that were imported by then give methods to all modules.
    names = frozenset({*"abcdx", "one", "other", "p", "weight", "rate", "in_features"})
    return Structure(Account.take({"value": value}, names), [value])


def holder(**attributes):
    return types.SimpleNamespace(**attributes)


def pair(same):
    first = [1]
    return holder(one=first, other=first if same else [1])


def reader(number):
    return lambda: number


def ordered(*keys):
    made = collections.OrderedDict(a=1, b=2)
    for key in keys:
        made.move_to_end(key)
    return holder(a=made)


def fields(*names):
    return np.array([(1.0, 2.0)], dtype=[(name, float) for name in names])


def named(function, name):
    function.__name__ = name
    return function


SAME = {
    "numbers": lambda: holder(a=1.5, b=300, c="text", d=(None, True, -0.0)),
    "containers": lambda: holder(a={"x": [1, {2}]}, b=frozenset({3})),
    "one object twice": lambda: pair(True),
    "two objects": lambda: pair(False),
    "closure": lambda: reader(3),
    "modules": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)),
    "tensor": lambda: holder(a=torch.rand(2, 3)),
    "lock": lambda: holder(a=threading.Lock()),
    "sentinel": lambda: holder(a=object()),
    "method": lambda: holder(a=nn.Linear(2, 3).forward),
    "class": lambda: type("Made", (), {"rate": 0.5})(),
}


def test_equal_state_has_one_structure_and_other_state_another():
    digests = [{structure_of(make()).digest for _ in range(2)} for make in SAME.values()]
    assert all(len(each) == 1 for each in digests)
    assert len(set.union(*digests)) == len(SAME)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (holder(a=1), holder(a=1.0)),
        (holder(a=0.0), holder(a=-0.0)),
        (holder(a=1), holder(a=True)),
        (holder(a={"x": 1, "y": 2}), holder(a={"y": 2, "x": 1})),
        (holder(a=(1, 2)), holder(a=[1, 2])),
        (holder(a=torch.zeros(2, 3)), holder(a=torch.zeros(3, 2).t())),
        (holder(a=torch.zeros(2)), holder(a=torch.zeros(2, requires_grad=True))),
        (holder(a=torch.zeros(2)), holder(a=torch.zeros(3)[:2])),
        (reader(3), reader(4)),
        (pair(True), pair(False)),
        (ordered("a", "b"), ordered("b", "a")),
        (holder(a=array.array("f", [2.0])), holder(a=array.array("i", [1073741824]))),
        (holder(a=fields("x", "y")), holder(a=fields("y", "x"))),
        (holder(a=math.nan), holder(a=-math.nan)),
        (holder(a=(2, 3)), holder(a=torch.Size((2, 3)))),
        (reader(3), named(reader(3), "other")),
    ],
)
def test_other_state_is_told_apart(one, other):
    assert structure_of(one).digest != structure_of(other).digest


def looking():
    return id(looking)


@pytest.mark.parametrize("value", [iter([1]), holder(a=iter([1])), looking, (x for x in ())])
def test_what_cannot_be_compared_has_none(value):
    with pytest.raises(NoStructureError):
        structure_of(value)


def test_tensors_have_the_same_numbers_in_equal_structures():
    ones, others = (
        holder(a=torch.ones(2), b=torch.ones(3)),
        holder(a=torch.zeros(2), b=torch.ones(3)),
    )
    first, second = structure_of(ones), structure_of(others)
    assert second.tensors[first.number_of(ones.a)] is others.a
    assert second.tensors[first.number_of(ones.b)] is others.b
    assert first.number_of(others.a) is None
    assert not first.without_tensors().tensors


NOWHERE = contextvars.ContextVar("nowhere")
PLAIN = contextvars.ContextVar("plain", default=0.5)
OF_AN_OBJECT = contextvars.ContextVar("of an object", default=([],))


def test_context_variables_count_with_plain_values():
    def digests(value=None):
        if value is not None:
            PLAIN.set(value)
        return structure_of(holder(a=PLAIN, b=NOWHERE)).digest

    assert digests() == digests()
    values = (0.5, 0.0, -0.0, "text", 1, True, 1.0, (1, 2), (True, 2))
    set_ = [contextvars.copy_context().run(digests, value) for value in values]
    assert len({digests(), *set_}) == 1 + len(values)
    with pytest.raises(NoStructureError):
        contextvars.copy_context().run(digests, [1])
    with pytest.raises(NoStructureError):
        structure_of(holder(a=OF_AN_OBJECT))


def portable_of(value):
    names = frozenset({*"abcdx", "one", "other", "p", "weight", "rate", "in_features"})
    return Structure(Account.take({"value": value}, names), [value], portable=True).portable


def test_a_portable_digest_tells_apart_what_a_structure_does():
    found = [{portable_of(make()) for _ in range(2)} for make in SAME.values()]
    assert all(len(each) == 1 and None not in each for each in found)
    assert len(set.union(*found)) == len(SAME)


def test_the_environment_does_not_count_but_where_code_names_it(monkeypatch):
    def step():
        return 1

    def reading():
        return os.environ["A_NAME"]

    before = portable_of(holder(a=step))
    assert portable_of(holder(a=reading)) is None
    monkeypatch.setenv("A_NAME", "b")
    assert portable_of(holder(a=step)) == before is not None


def test_what_goes_by_the_hashes_of_a_process_is_of_that_process():
    def goes_through():
        return [*{"a", "b"}]

    def asks():
        return "a".__hash__()

    assert portable_of(holder(a=goes_through)) is None
    assert portable_of(holder(a=asks)) is None


def test_what_has_no_name_in_other_processes_has_no_portable_digest():
    assert portable_of(holder(a=types.ModuleType("torch"))) is None
