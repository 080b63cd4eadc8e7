"""Which names code can read, and when it may read any."""

import copy
import functools

import pytest

from waterflow.account.code_names import code_names, names_in

pytestmark = pytest.mark.virtual

scale = 2.0


def reads(x):
    return x.left + scale


def test_attributes_and_globals_are_apart():
    found = code_names(reads.__code__)
    assert found.global_names == {"scale"}
    assert {"left", "scale"} <= found.names
    assert not found.imports


def nesting(x):
    import json

    return lambda: json.loads(x).inner


def test_functions_inside_count():
    found = code_names(nesting.__code__)
    assert {"inner", "loads"} <= found.names
    assert found.imports


def many(count):
    """Code with so many names that instructions take extended arguments."""
    text = "\n".join(f"a{number}" for number in range(count)) + "\nlast"
    return compile(text, "<text>", "exec")


def test_names_beyond_a_byte_are_found():
    assert code_names(many(300)).global_names == {*(f"a{n}" for n in range(300)), "last"}


def by_constant(x):
    return getattr(x, "hidden", None), hasattr(x, "other")


def by_variable(x, name):
    return getattr(x, name)


def by_constant_and_variable(x, name):
    return getattr(x, "one"), getattr(getattr(x, "two"), name)  # noqa: B009


def by_dictionary(x):
    return x.__dict__


def by_vars(x):
    return vars(x)


def by_matching(x):
    match x:
        case {"key": _}:
            return 1


def by_position(x):
    match x:
        case slice(1):
            return 1


def by_format(x):
    return "{0.hidden:>{1.other}}".format(x, x)


def handed_on(x, names):
    return functools.reduce(getattr, names, x)


def renamed(x, name):
    read = getattr
    return read(x, name)


def by_method(x, name):
    return object.__getattribute__(x, name)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (by_position, None),
        (by_format, {"hidden", "other"}),
        (handed_on, None),
        (renamed, None),
        (by_method, None),
        (by_constant, {"hidden", "other"}),
        (by_matching, {"key"}),
        (by_variable, None),
        (by_constant_and_variable, None),
        (by_dictionary, None),
        (by_vars, None),
    ],
)
def test_what_code_can_read_by_name(function, found):
    names = names_in([function.__code__])
    assert names is None if found is None else found <= names


def test_a_call_that_was_not_made_does_not_count():
    calls = [(len, reads.__code__, 1)]
    assert names_in([by_variable.__code__], calls) is not None
    assert names_in([handed_on.__code__], calls) is None, "whoever was given it calls it unseen"
    calls = [(getattr, by_variable.__code__, 1)]
    assert names_in([by_variable.__code__], calls) is None


def test_copies_read_everything_unless_only_what_is_executed_counts():
    code = copy.deepcopy.__code__
    assert names_in([code]) is None
    assert names_in([code], copied=False) is not None
