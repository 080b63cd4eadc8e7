"""What objects of a class consist of, and which never change."""

import collections
import enum
import random
import threading

import numpy as np
import pytest
import torch

from waterflow.account.class_parts import (
    base_of,
    is_a,
    is_constant_class,
    is_foreign,
    slots_of,
)

pytestmark = pytest.mark.virtual


class Plain:
    pass


class Slotted:
    __slots__ = ("__hidden", "left")


class Below(Slotted):
    __slots__ = ("right",)


class Words(dict):
    pass


class Both(Words, Plain):
    pass


class Kind(enum.Enum):
    ONE = 1


class Liar:
    @property
    def __class__(self):
        raise AssertionError("asked for its class")


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (Plain, object),
        (Below, object),
        (Words, dict),
        (Both, dict),
        (collections.OrderedDict, dict),
        (collections.Counter, dict),
        (Kind, object),
        (ValueError, BaseException),
        (type(iter([])), None),
        (threading.local, None),
        (np.ndarray, None),
    ],
    ids=lambda kind: getattr(kind, "__name__", str(kind)),
)
def test_what_objects_hold_beside_attributes(kind, base):
    if kind is collections.OrderedDict:
        assert base_of(kind) is not None
    else:
        assert base_of(kind) is base


def test_slots_of_all_bases_are_found_with_their_descriptors():
    found = dict(slots_of(Below))
    assert set(found) == {"right", "left", "_Slotted__hidden"}
    value = Below()
    value.left = 3
    assert found["left"].__get__(value) == 3


def test_nobody_is_asked_for_a_class():
    assert is_a(Liar(), Liar)
    assert not is_a(Liar(), int)


@pytest.mark.parametrize(
    "kind", [int, str, torch.dtype, np.float32, range, type(torch.ops.aten.add)]
)
def test_constants(kind):
    assert is_constant_class(kind)


@pytest.mark.parametrize("kind", [list, Plain, torch.Tensor, np.ndarray, Words])
def test_no_constants(kind):
    assert not is_constant_class(kind)


def test_what_users_put_into_libraries_is_foreign():
    assert is_foreign(Plain)
    assert is_foreign(test_constants)
    assert is_foreign(Plain())
    assert is_foreign(random.Random(0).random)  # bound to an object
    for own in (torch.nn.Linear, torch.nn.functional.linear, torch.relu, len, random.Random, 3):
        assert not is_foreign(own), own
