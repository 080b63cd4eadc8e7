"""Whose code is trusted to keep no state of the user's."""

import dataclasses
import gc
import json
import os
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch

import waterflow
from waterflow.account.trust import (
    is_generated_code,
    is_own_class,
    is_standard_file,
    is_trusted_class,
    is_trusted_code,
    is_trusted_file,
    is_trusted_name,
    keeps_switches,
)
from waterflow.engine.engine import Engine
from waterflow.models import resnet
from waterflow.partitioner.groups import cut_at
from waterflow.report.job_report import JobReport

pytestmark = pytest.mark.virtual


def made_by_exec():
    namespace = {}
    exec(compile("def f(): pass", "<made>", "exec"), namespace)
    return namespace["f"]


def test_code_of_the_library_torch_numpy_and_this_package_is_trusted():
    for function in (json.dumps, torch.nn.Linear.forward, np.median, Engine.submit, cut_at):
        function = getattr(function, "__wrapped__", function)
        assert is_trusted_code(function.__code__), function
    for function in (made_by_exec, made_by_exec(), pytest.fixture, resnet.resnet50):
        assert not is_trusted_code(function.__code__), function


def test_files():
    assert is_standard_file(os.__file__)
    assert is_standard_file("<frozen os>")
    assert not is_standard_file(torch.__file__)
    assert is_trusted_file(torch.__file__)
    assert not is_trusted_file("<string>")
    assert not is_trusted_file(resnet.__file__)
    assert not is_trusted_file(__file__)


def test_modules_are_known_by_their_file_else_by_their_name(monkeypatch, tmp_path):
    for name in ("json", "sys", "torch.nn", "waterflow.steps.step_cache", "_json"):
        assert is_trusted_name(name), name
    for name in ("__main__", "waterflow.models", "waterflow.models.resnet", "pytest", None, 3):
        assert not is_trusted_name(name), name
    module = types.ModuleType("torch_of_the_user")
    module.__file__ = str(tmp_path / "torch_of_the_user.py")
    monkeypatch.setitem(sys.modules, "torch_of_the_user", module)
    assert not is_trusted_name("torch_of_the_user")


def test_classes():
    assert is_trusted_class(torch.nn.Linear)
    assert is_trusted_class(dict)
    assert not is_trusted_class(resnet.ResNet)
    assert is_own_class(waterflow.Job)
    assert not is_own_class(resnet.ResNet)
    assert not is_own_class(torch.nn.Linear)

    @dataclasses.dataclass
    class Mine:
        pass

    assert not is_trusted_class(Mine)
    assert not is_own_class(Mine)


def test_modules_of_torch_keep_what_users_set():
    assert keeps_switches(torch.nn.modules.module.__file__)
    assert keeps_switches(sys.modules["torch.optim.optimizer"].__file__)
    assert not keeps_switches(torch.functional.__file__)


class Pair(NamedTuple):
    one: int
    other: int


@dataclasses.dataclass
class Users:
    one: int


def test_code_that_the_standard_library_writes():
    """A named tuple's makes a tuple, whoever's it is; a data class's runs what its fields name."""
    assert is_generated_code(Pair.__new__.__code__)
    gc.unfreeze()  # or nobody finds the class
    assert is_generated_code(JobReport.__init__.__code__)
    gc.freeze()
    assert not is_generated_code(torch.nn.Linear.__init__.__code__)  # trusted by its file
    assert not is_generated_code(Users.__init__.__code__)
    assert not is_generated_code(test_code_that_the_standard_library_writes.__code__)
    assert not is_generated_code(eval("lambda _cls, one: _tuple_new(_cls, (one, 1))").__code__)
