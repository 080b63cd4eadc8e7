"""The walk through code: functions, closures, the globals they name, modules and classes."""

import functools
import json
import math
import types

import pytest

from waterflow.account.walk import Walk

pytestmark = pytest.mark.virtual

table = {"beta": [1.0]}
unread = [2.0]
helpers = types.ModuleType("walked_helpers")
helpers.gain, helpers.other = [3.0], [4.0]


def walked(value, codes=None, names=None):
    walk = Walk(names, codes, {})
    walk.run({"root": value})
    return walk


def trail_of(walk, value):
    trail = walk.objects.get(id(value))
    return None if trail is None else str(trail)


def reads_global():
    return table["beta"]


def test_globals_that_code_names_are_read_and_no_others():
    walk = walked(reads_global)
    assert trail_of(walk, table).startswith("global 'table' of reads_global (")
    assert trail_of(walk, unread) is None


def test_a_global_that_is_replaced_is_seen(monkeypatch):
    walk = walked(reads_global)
    monkeypatch.setitem(globals(), "table", dict(table))
    index, part = walk.guards.difference()
    assert walk.places[index].text(part).startswith("global 'table' of reads_global (")


def shadows_builtin():
    return len(())


def test_a_global_that_hides_a_builtin_is_seen(monkeypatch):
    walk = walked(shadows_builtin)
    assert walk.guards.holds()
    monkeypatch.setitem(globals(), "len", lambda value: 7)
    assert not walk.guards.holds()


def reads_module():
    return helpers.gain


def test_of_modules_only_what_code_names_is_read():
    walk = walked(reads_module)
    assert trail_of(walk, helpers.gain) is not None
    assert trail_of(walk, helpers.other) is None


def test_closures_and_defaults():
    kept, given, keyword = [1], [2], {"a": [3]}

    def function(x=given, *, y=keyword):
        return kept, x, y

    walk = walked(function)
    where = f"(test_code_walk.py:{function.__code__.co_firstlineno})"
    assert trail_of(walk, kept).startswith("closure variable 'kept' of test_closures")
    assert trail_of(walk, given).startswith("a default of test_closures")
    assert trail_of(walk, keyword) is not None
    assert where.strip("()").split("/")[-1] in trail_of(walk, kept)


def test_a_variable_in_a_closure_is_seen_to_change():
    kept = 1

    def function():
        return kept

    walk = walked(function)
    kept = 2
    assert not walk.guards.holds()


def test_code_that_was_not_executed_is_not_looked_into():
    kept = [1]

    def function():
        return kept

    assert trail_of(walked(function, codes=[]), kept) is None
    assert trail_of(walked(function, codes=[function.__code__]), kept) is not None


class Box:
    def __init__(self, held):
        self.held = held


def test_functions_behind_wrappers_are_found():
    kept = [1]

    def function(x):
        return kept

    for value in (
        functools.partial(function, 1),
        functools.lru_cache(function),
        staticmethod(function),
        property(function),
        types.MethodType(function, Box(None)),
        functools.wraps(function)(lambda x: function(x)),
    ):
        assert trail_of(walked(value), kept) is not None, value


class Meta(type):
    levels = [1]  # noqa: RUF012


class Base:
    shared = {}  # noqa: RUF012


class Derived(Base, metaclass=Meta):
    pass


def test_classes_are_walked_with_their_bases_and_metaclass():
    walk = walked(Derived())
    assert trail_of(walk, Base.shared) == "Base.shared"
    assert trail_of(walk, Meta.levels) == "Meta.levels"
    Base.shared = {}
    index, part = walk.guards.difference()
    assert walk.places[index].text(part) == "Base.shared"


def uses_libraries(x):
    return json.dumps(math.sqrt(x))


def test_what_code_uses_of_libraries_is_noted_by_name():
    walk = walked(uses_libraries)
    assert walk.libraries == {"json", "math"}
    assert any(function is math.sqrt for function in walk.built_ins.values())
    assert not walk.unwalkable


def test_trusted_code_is_not_looked_into_but_for_what_it_wraps():
    kept = [1]

    def function():
        return kept

    assert trail_of(walked(functools.wraps(function)), kept) is not None
    walk = walked(json.dumps)
    assert trail_of(walk, json.encoder.ESCAPE_DCT) is None
