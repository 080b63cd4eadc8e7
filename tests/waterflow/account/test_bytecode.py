"""What code names: functions inside it, modules that it imports."""

import pytest

from waterflow.account.bytecode import imports_of, nested_codes

pytestmark = pytest.mark.virtual


def outer():
    def inner():
        return lambda: 1

    return inner


def test_codes_inside_codes():
    names = [code.co_name for code in nested_codes(outer.__code__)]
    assert names == ["outer", "inner", "<lambda>"]


def imported(text, package=""):
    code = compile(text, "<text>", "exec")
    return list(imports_of(code, {"__package__": package}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os.path", [("os.path", ())]),
        ("import os.path as p, json", [("os.path", ()), ("json", ())]),
        ("from json import loads, dumps", [("json", ("loads", "dumps"))]),
        ("from json import *", [("json", ("*",))]),
        ("x = 1", []),
    ],
)
def test_imports(text, found):
    assert imported(text) == found


def test_relative_imports_are_those_of_their_package():
    assert imported("from . import one", "a.b") == [("a.b", ("one",))]
    assert imported("from ..c import two", "a.b") == [("a.c", ("two",))]


def test_a_relative_import_outside_of_any_package_keeps_its_dots():
    """It raises when it runs; looking at it must not."""
    assert imported("from .c import two") == [(".c", ("two",))]
