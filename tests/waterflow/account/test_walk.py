"""The walk through objects: what it meets, how it names that, where it stops."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.shared_objects import OfItsOwn, answering_class
from waterflow.account.code_walk import Late
from waterflow.account.walk import Limits, Walk

pytestmark = pytest.mark.cpu


class Box:
    def __init__(self, **parts):
        vars(self).update(parts)


def walked(most=None, names=None, skip=None, **roots):
    walk = Walk(names, None, skip or {})
    if most is not None:
        walk.limits = Limits(most)
    walk.run(roots)
    return walk


def met(walk, value):
    return walk.seen.get(id(value)) is value


def trail_of(walk, value):
    return str(walk.objects[id(value)])


def test_objects_are_called_after_the_way_to_them():
    deep, shared = [1], {}
    box = Box(inner=Box(items=[deep, (shared,)]), again=shared)
    walk = walked(box=box)
    assert trail_of(walk, box) == "box"
    assert trail_of(walk, box.inner) == "box.inner"
    assert trail_of(walk, deep) == "box.inner.items[0]"
    assert trail_of(walk, shared) == "box.again"  # the shortest
    assert walk.is_whole
    assert not walk.unwalkable


def test_what_several_roots_have_is_called_after_the_first():
    shared = []
    walk = walked(one=Box(held=shared), other=[shared])
    assert trail_of(walk, shared) == "one.held"


def test_modules_have_their_parts_as_attributes():
    model = nn.Sequential(nn.Linear(2, 2))
    walk = walked(model=model)
    assert trail_of(walk, model[0].weight) == "model.0.weight"
    assert model[0].weight.untyped_storage()._cdata in walk.objects


def test_only_names_that_count_are_followed():
    box = Box(wanted=[1], other=[2])
    walk = walked(box=box, names={"wanted"})
    assert met(walk, box.wanted)
    assert not met(walk, box.other)


def test_skipped_places_are_not_followed():
    box = Box(left=[1], right=[2])
    walk = walked(box=box, skip={id(box): {"left"}})
    assert not met(walk, box.left)
    assert met(walk, box.right)
    held = {"left": [1]}
    assert not met(walked(d=held, skip={id(held): None}), held["left"])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (iter(np.arange(2)), "builtins.iterator"),
        (threading.Thread, None),
        (torch.zeros(2).to_sparse(), None),
        (np.zeros(1 << 25, dtype=np.uint8), "an array above 16 MiB"),
        (itertools.count(), None),
    ],
    ids=["foreign iterator", "class", "sparse", "large", "iterator"],
)
def test_what_cannot_be_seen_through_is_said(value, kind):
    walk = walked(box=Box(value=value))
    found = [(str(trail), what) for trail, what in walk.unwalkable]
    if kind is None:
        assert found == []
    else:
        assert found == [("box.value", kind)]


def test_what_each_thread_has_for_itself_cannot_be_seen_from_another():
    assert walked(box=Box(local=threading.local())).unwalkable


def test_beyond_so_many_objects_nothing_is_whole():
    walk = walked(most=10, box=Box(items=[[] for _ in range(100)]))
    assert not walk.is_whole
    assert any("more than 10 objects" in what for _, what in walk.unwalkable)


def test_what_was_found_is_guarded():
    box = Box(items=[1, 2], level=1)
    walk = walked(box=box)
    assert walk.guards.holds()
    box.items.append(3)
    assert not walk.guards.holds()
    box.items.pop()
    assert walk.guards.holds()
    box.level = 2
    index, part = walk.guards.difference()
    assert walk.places[index].text(part) == "box.level"


def test_nobodys_code_runs():
    class Touchy:
        def __getattr__(self, name):
            raise AssertionError(name)

        @property
        def shown(self):
            raise AssertionError("shown")

        def __iter__(self):
            raise AssertionError("iterated")

        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    walk = walked(box=Box(touchy=Touchy()))
    assert walk.guards.holds()


def test_what_cannot_be_walked_is_told_and_stops_nobody():
    last = [1]
    walk = walked(first=[OfItsOwn(), answering_class()], second=last)
    (trail, what), *others = walk.unwalkable
    assert (str(trail), what, others) == ("first[1]", "thing that raises RuntimeError", [])
    assert met(walk, last)


def test_what_is_put_aside_is_walked_last_and_skipped_where_nothing_else_leads_to_it():
    inner, outer = {"rate": 1.0}, {"rate": 2.0}
    owner = {"inner": inner, "outer": outer}
    roots = {"step": [owner, outer], "owner": owner}
    late = Late(("owner",), {id(owner)}, {id(inner): {"rate"}, id(outer): {"rate"}})
    walk = Walk(None, None, {})
    walk.run(roots, late)
    assert walk.guards.difference() is None
    inner["rate"] = 3.0  # its owner's alone
    assert walk.guards.difference() is None
    outer["rate"] = 3.0
    assert walk.guards.difference() is not None


@pytest.mark.parametrize(("many", "is_whole"), [(500, True), (5000, False)])
def test_a_look_at_much_ends_in_time(many, is_whole):
    walk = Walk(None, None, {})
    walk.limits = Limits(until=time.thread_time())
    walk.run({"things": [[number] for number in range(many)]})
    assert walk.is_whole == is_whole
