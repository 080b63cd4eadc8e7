"""What a fingerprint sees of objects and classes."""

import collections

import numpy as np
import pytest
from torch import nn

from waterflow.capture.fingerprint_parts import (
    content_of,
    is_foreign,
    is_installed,
    is_written_in_python,
    slots_of,
)

pytestmark = pytest.mark.virtual


class Config:
    pass


class Slotted:
    __slots__ = ("left",)


class Below(Slotted):
    __slots__ = ("__dict__", "right")


def patch(self, x):
    return x


def test_parts():
    assert slots_of(Below) == ["right", "left"]
    assert is_written_in_python(Config)
    assert is_written_in_python(collections.UserDict)
    assert not is_written_in_python(np.ndarray)
    assert not is_written_in_python(type(iter([])))
    assert is_foreign(patch)
    assert not is_foreign(nn.Linear)
    assert is_installed("json.decoder")
    assert is_installed("torch.fx")
    assert not is_installed("of_nobody")


def test_a_cell_may_be_empty():
    def read():
        return later

    assert content_of(read.__closure__[0]) == "an empty cell"
    later = 1
    assert content_of(read.__closure__[0]) == 1
