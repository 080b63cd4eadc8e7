"""Places: what users call them, and that each puts back what it had."""

import abc
import collections.abc
import functools
from collections import OrderedDict, deque
from types import FunctionType

import numpy as np
import pytest

from waterflow.account import places
from waterflow.account.places import Trail
from waterflow.account.probes import Probe

pytestmark = pytest.mark.virtual


class Thing:
    pass


class Other:
    pass


def test_a_trail_reads_as_code():
    trail = Trail("model").attribute("layers").item(3).item("key").attribute("weight")
    assert str(trail) == "model.layers[3]['key'].weight"
    assert str(Trail("d").item(Thing())) == "d[an object of Thing]"


def test_attributes_come_back_and_those_that_came_go():
    thing = Thing()
    thing.left, thing.skipped = 1, 1
    place = places.Attributes(Trail("thing"), thing, [("left", 1)], None, {"skipped"})
    thing.left, thing.skipped, thing.new = 2, 2, 3
    thing.__class__ = Other
    place.restore()
    assert vars(thing) == {"left": 1, "skipped": 2}
    assert type(thing) is Thing
    assert place.text("left") == "thing.left"
    assert place.text(None) == "thing"


def test_only_names_that_count_are_touched():
    thing = Thing()
    place = places.Attributes(Trail("thing"), thing, [], frozenset({"watched"}), None)
    thing.watched, thing.unwatched = 1, 1
    place.restore()
    assert vars(thing) == {"unwatched": 1}


def test_attributes_of_a_class():
    class Kind:
        level = 1

    watched = {"level", "new"}.__contains__
    place = places.ClassAttributes(Trail("Kind"), Kind, [("level", 1)], watched)
    Kind.level, Kind.new, Kind.unwatched = 2, 3, 4
    place.restore()
    assert Kind.level == 1
    assert not hasattr(Kind, "new")
    assert Kind.unwatched == 4


def test_globals_are_called_as_the_code_that_reads_them_does():
    namespace = {"beta": 1}
    trails = {"beta": Trail("global 'beta' of f"), "gamma": Trail("global 'gamma' of g")}
    place = places.Names(namespace, trails)
    namespace.update(beta=2, gamma=3, delta=4)
    place.restore()
    assert namespace == {"beta": 1, "delta": 4}
    assert place.text("gamma") == "global 'gamma' of g"


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_items_of_a_dictionary_come_back_in_their_order(kind):
    holder = kind(a=1, b=2, skipped=3)
    before = [("a", 1), ("b", 2)]
    place = places.Mapping(Trail("d"), holder, before, {"skipped"}, dotted=False)
    del holder["a"]
    holder["a"], holder["c"], holder["skipped"] = 9, 9, 9
    place.restore()
    assert list(holder.items()) == [("a", 1), ("b", 2), ("skipped", 9)]
    assert place.text("a") == "d['a']"
    assert places.Mapping(Trail("m"), holder, [], None, dotted=True).text("a") == "m.a"


@pytest.mark.parametrize("kind", [list, set, deque])
def test_items_of_containers_come_back(kind):
    holder = kind([1, 2, 3])
    place = places.Items(Trail("c"), holder, kind, list(holder))
    holder.clear()
    (holder.add if kind is set else holder.append)(9)
    place.restore()
    assert holder == kind([1, 2, 3])
    assert place.text(1) == ("c" if kind is set else "c[1]")


def test_a_cell_comes_back_full_or_empty():
    value = 1

    def read():
        return value

    (cell,) = read.__closure__
    place = places.Cell(Trail("value"), cell, [1])
    value = 2
    place.restore()
    assert read() == 1
    places.Cell(Trail("value"), cell, []).restore()
    with pytest.raises(ValueError, match="empty"):
        cell.cell_contents  # noqa: B018


def test_a_function_comes_back():
    def function(x, y=1, *, z=2):
        return x + y + z

    function = FunctionType(function.__code__, {}, "function", function.__defaults__, None)
    place = places.Function(Trail("function"), function)
    function.__defaults__ = (5,)
    function.__code__ = (lambda x, y, *, z: 0).__code__
    place.restore()
    assert function(1, z=2) == 4


@pytest.mark.parametrize(
    "make",
    [lambda: bytearray(b"ab"), lambda: np.arange(2), lambda: memoryview(bytearray(b"ab"))],
    ids=["bytearray", "array", "memoryview"],
)
def test_memory_comes_back(make):
    holder = make()
    before = list(holder)
    place = places.Memory(Trail("m"), holder)
    holder[0] = 9
    place.restore()
    assert list(holder) == before


def test_what_tells_its_state_takes_it_back_where_it_can():
    holder = [1]

    def put_back(holder, state):
        holder[:] = [state]

    places.Probed(Trail("p"), holder, 7, Probe(len, put_back)).restore()
    places.Probed(Trail("p"), holder, 8, Probe(len)).restore()
    assert holder == [7]
    kept = Probe(len, put_back, keep=lambda holder: holder[0] + 1)
    places.Probed(Trail("p"), holder, 9, kept).restore()
    assert holder == [8]


def test_a_partial_takes_back_what_it_calls_and_with_what():
    def fields():
        return held.func, held.args, held.keywords, held.name

    held = functools.partial(max, 1, default=2)
    held.name = "held"
    before = fields()
    slots = [vars(functools.partial)[name] for name in ("func", "args", "keywords")]
    found = [places.Slot(Trail("s"), held, slot, [slot.__get__(held)]) for slot in slots]
    held.__setstate__((min, (3,), {}, {"name": "held"}))
    for place in found:
        place.restore()
    assert fields() == before


def test_a_class_told_of_another_is_noticed_where_somebody_else_tells():
    abstract, told = abc.ABCMeta("Abstract", (), {}), type("Told", (), {})
    below = abc.ABCMeta("Below", (abstract,), {})
    place = places.Registered((abstract,))
    collections.abc.AsyncGenerator.register(type("Other", (), {}))
    assert place.read() == place.before == ()
    below.register(told)
    assert place.read() == ((below, told),)


def test_names_that_a_module_lacks_are_called_as_its_attributes():
    trails = {"missing": places.Within(Trail("settings")), "there": Trail("global 'there' of f")}
    place = places.Names({"there": 1}, trails)
    assert place.text("missing") == "settings.missing"
    assert place.text("there") == "global 'there' of f"
