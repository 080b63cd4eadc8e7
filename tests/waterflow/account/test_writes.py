"""Which code may change what other code reads."""

from __future__ import annotations

import abc
import decimal
import functools
import os
import types

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.account.account import Account
from waterflow.account.writes import may_change

pytestmark = pytest.mark.virtual

LEVEL, OTHER = 1.0, 2.0
TABLE = {"level": 1.0}
MODULE = types.ModuleType("levels")
MODULE.level = 1.0


class Levels:
    level = 1.0


class Mine(Levels):
    def __init__(self):
        self.level = 2.0


def helper(level=1.0):
    return level


def sets_global():
    global LEVEL
    LEVEL = 2.0


def sets_other():
    global OTHER
    OTHER = 3.0


def sets_in_module():
    MODULE.level = 2.0


def sets_in_class():
    Levels.level = 2.0


def sets_default():
    helper.__defaults__ = (2.0,)


def sets_item():
    TABLE["level"] = 2.0


def sets_by_name(name="level"):
    setattr(Levels, name, 2.0)


def sets_by_dictionary():
    globals()["LEVEL"] = 2.0


def sets_variable():
    os.environ["LEVEL"] = "2"


def sets_switch():
    torch.set_default_dtype(torch.float32)


def looks_for_anomalies():
    torch.autograd.set_detect_anomaly(True)


def sets_strategy():
    torch.multiprocessing.set_sharing_strategy("file_system")


def sets_hook():
    nn.modules.module.register_module_forward_hook(print)


def patches():
    nn.Linear.forward = helper


def sets_own():
    found = types.SimpleNamespace()
    found.level = 2.0
    return found


class Kind(metaclass=abc.ABCMeta):
    """Classes can be registered with it."""

    @abc.abstractmethod
    def kind(self):
        """Which it is."""


@functools.cache
def remembering(number):
    return number


def sets_printing():
    np.set_printoptions(precision=3)


def sets_rounding():
    decimal.getcontext().prec = 3


def registers():
    Kind.register(int)


def reads_all(x=None):
    layer = nn.Linear(2, 2)
    held = isinstance(layer, Kind), str(np.zeros(1)), remembering.cache_info()
    return LEVEL, MODULE.level, Levels.level, helper(), TABLE["level"], held, os.environ["HOME"]


#: Code, and whether it may change what `reads_all` reads.
WRITERS = {
    "a global": (sets_global, True),
    "another global": (sets_other, False),
    "a module": (sets_in_module, True),
    "a class": (sets_in_class, True),
    "a default": (sets_default, True),
    "an item": (sets_item, True),
    "by a name": (sets_by_name, True),
    "by a dictionary": (sets_by_dictionary, True),
    "the environment": (sets_variable, True),
    "a switch": (sets_switch, True),
    "anomaly mode": (looks_for_anomalies, True),
    "a strategy": (sets_strategy, True),
    "a hook": (sets_hook, True),
    "torch's code": (patches, True),
    "how numpy prints": (sets_printing, True),
    "how decimals are rounded": (sets_rounding, True),
    "what a class is told of": (registers, True),
    "how much is remembered": (lambda: remembering(3), True),
    "what it has made": (sets_own, False),
    "a function that it calls, too": (lambda: helper(3.0), False),
    "nothing": (lambda x: x + 1, False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_may_change_what_is_read(name):
    code, expected = WRITERS[name]
    writer, read = Account.take({"data": code}), Account.take({"loss": reads_all})
    assert may_change(writer, read) is expected


def test_variables_of_functions_around():
    level = 1.0

    def sets():
        nonlocal level
        level = 2.0

    def reads():
        return level

    taken = [Account.take({"code": code}) for code in (sets, reads)]
    assert may_change(*taken)
    assert not may_change(*reversed(taken))


def test_an_object_of_a_class_that_is_read():
    """It may write to its own attributes, and to nothing else."""
    assert may_change(Account.take({"data": Mine}), Account.take({"loss": reads_all}))
    taken = Account.take({"loss": lambda: LEVEL})
    assert not may_change(Account.take({"data": Mine()}), taken)
