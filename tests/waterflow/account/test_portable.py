"""Names and digests that are equal in every process, for what is the same there."""

from __future__ import annotations

import functools
import logging
import math
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from waterflow.account.portable import NotPortableError, code_digest, portable_name

pytestmark = pytest.mark.virtual

CODE = "def f(x, y=1):\n    z = x.first + 2.0\n    return [z for _ in range(3)]\n"


def code_of(text):
    namespace = {}
    exec(compile(text, "some file", "exec"), namespace)
    return namespace["f"].__code__


def test_lines_and_files_do_not_count():
    moved = compile("\n\n# more\n" + CODE, "another file", "exec")
    namespace = {}
    exec(moved, namespace)
    assert code_digest(namespace["f"].__code__) == code_digest(code_of(CODE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first", "last"),
        ("2.0", "2"),
        ("2.0", "-2.0"),
        ("range(3)", "range(4)"),
        ("x, y=1", "x, *, y=1"),
        ("x, y=1", "y, x=1"),
        ("+", "-"),
        ("for _ in", "for z in"),
        ("z = x", "w = z = x"),
    ],
)
def test_all_else_does(old, new):
    assert code_digest(code_of(CODE.replace(old, new))) != code_digest(code_of(CODE))


def test_a_set_among_the_constants_has_no_order():
    text = "def f(x):\n    return x in {%s}\n"
    one, other = (", ".join(map(repr, names)) for names in ("abcdefgh", "hgfedcba"))
    assert code_digest(code_of(text % one)) == code_digest(code_of(text % other))
    assert code_digest(code_of(text % one)) != code_digest(code_of(text % "'a', 1"))


@pytest.mark.parametrize(
    "value",
    [
        *(torch, nn.Linear, nn.Linear.forward, torch.relu, torch._C._nn.linear, math.sqrt, len),
        *(torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.float32, dict.get),
        *(int | None, list[int], np.add, logging.getLogger("some"), torch.Tensor, ["a", 1], {}),
        *(nn.Linear.__constants__, types.FunctionType, torch.nn.functional.relu, type(None)),
    ],
)
def test_what_is_there_once_has_a_name_without_an_address(value):
    name = portable_name(value)
    assert "0x" not in name
    assert name == portable_name(value)


def test_names_tell_apart():
    some = (torch.relu, torch.tanh, nn.Linear, nn.Conv2d, nn.Linear.forward, nn.Conv2d.forward)
    assert len(set(map(portable_name, (*some, 1, 1.0, True, "1", [1], (1,), {1: 1}, {1})))) == 14


class Own:
    pass


def made_for_one_job():
    class Linear(nn.Linear):
        pass

    Linear.__module__ = "torch.nn.modules.linear"
    Linear.__qualname__ = "Linear"
    return Linear


@pytest.mark.parametrize(
    "value",
    [
        *(Own, Own(), made_for_one_job(), lambda: 1, [Own()], random.Random(0)),
        *(types.ModuleType("torch"), torch.ones(2), functools.partial(len), iter([])),
    ],
)
def test_what_may_be_another_has_none(value):
    with pytest.raises(NotPortableError):
        portable_name(value)
