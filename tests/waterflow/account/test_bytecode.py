"""What code says by its instructions: functions inside it, imports, whether it catches errors."""

import contextlib

import pytest

from waterflow.account.bytecode import catches, imports_of, nested_codes

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


def of_one_kind():
    try:
        outer()
    except ValueError:
        return None
    return outer


def of_several_kinds():
    try:
        outer()
    except (KeyError, IndexError):
        return None
    return outer


def of_all_kinds():
    try:
        outer()
    except:  # noqa: E722
        return None
    return outer


def suppressed():
    with contextlib.suppress(ValueError):
        outer()


def others():
    try:
        outer()
    except (KeyError, AttributeError):
        return None
    return outer


def cleaned_up():
    try:
        with contextlib.nullcontext():
            outer()
    finally:
        outer()


@pytest.mark.parametrize("function", [of_one_kind, of_several_kinds, of_all_kinds, suppressed])
def test_code_that_goes_on_after_errors_of_operators(function):
    assert catches(function.__code__)


@pytest.mark.parametrize("function", [others, cleaned_up, outer])
def test_code_that_does_not(function):
    assert not catches(function.__code__)
