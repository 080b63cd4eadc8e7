"""The flat list of checks: what counts as equal, which part differs, what is never called."""

import struct
import types

import numpy as np
import pytest
import torch

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual


class Plain:
    pass


class Slotted:
    __slots__ = ("x",)


def nan(bits):
    return struct.unpack("d", struct.pack("Q", bits))[0]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1.5, float("1.5"), True),
        (0.0, -0.0, False),
        (nan(0x7FF8000000000000), nan(0x7FF8000000000000), True),
        (nan(0x7FF8000000000000), nan(0x7FF8000000000001), False),
        (10**30, int("1" + "0" * 30), True),
        (1, True, False),
        (1, 1.0, False),
        ("a" * 50, "".join(["a"] * 50), True),
        (b"ab", bytes([97, 98]), True),
        (complex(0.0, -0.0), complex(0.0, 0.0), False),
        ((1, (2.5, "x")), (1, (float("2.5"), "x")), True),
        ((1, [2]), (1, [2]), False),
        (torch.Size([2, 3]), torch.Size([2, 3]), True),
        (torch.device("cpu"), torch.device("cpu"), True),
        (np.float64(1.5), np.float64(1.5), True),
        (np.float64(1.5), np.float64(2.5), False),
        ([1], [1], False),
        (range(3), range(3), True),
        ("a".upper, "a".upper, True),
        (Plain.__init__, Plain.__init__, True),
    ],
)
def test_same_value(left, right, same):
    assert _C.same_value(left, right) is same


def test_the_part_that_differs_is_told():
    guards, holder = _C.Guards(), Plain()
    holder.x, holder.y = 1, 2
    assert guards.attributes(holder, {"x", "z"}, None) == [("x", 1)]
    holder.y = 3
    holder.w = 4
    assert guards.holds()
    holder.z = 5
    assert guards.difference() == (0, "z")
    del holder.z, holder.x
    assert guards.difference() == (0, "x")
    holder.x = 1
    assert guards.holds()
    holder.__class__ = type("Other", (Plain,), {})
    assert guards.difference() == (0, "__class__")


def changes(d):
    """Ways to change an entry, and to put it back."""
    yield lambda: d.update(a=2), lambda: d.update(a=1)
    yield lambda: d.__setitem__("new", 1), lambda: d.pop("new")
    yield lambda: d.setdefault("other", 0), lambda: d.popitem()
    yield lambda: d.__delitem__("b"), lambda: d.__setitem__("b", 3.0)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["mapping", "attributes", "plain attributes", "class"])
def test_every_change_after_a_look_is_seen(kind, number):
    """Looks remember what they have seen of a dictionary; no change may hide behind that."""
    guards, holder = _C.Guards(), Plain()
    holder.a, holder.b = 1, 3.0
    if kind == "mapping":
        guards.mapping(vars(holder), None)
    elif kind == "class":
        holder = type("Made", (), {"a": 1, "b": 3.0})
        guards.type(holder, None, {"__dict__", "__weakref__"})
    else:
        guards.attributes(holder, None, None)
    direct = Attributes(holder) if kind in ("plain attributes", "class") else vars(holder)
    change, back = list(changes(direct))[number]
    for _ in range(3):
        assert guards.holds()
        assert guards.holds()
        change()
        assert not guards.holds()
        assert not guards.holds()
        back()


class Attributes(dict):
    """What a dictionary does, done to the attributes of an object."""

    def __init__(self, holder):
        self.holder = holder

    def __setitem__(self, key, value):
        setattr(self.holder, key, value)

    def __delitem__(self, key):
        delattr(self.holder, key)

    def update(self, **new):
        for key, value in new.items():
            self[key] = value

    def pop(self, key):
        del self[key]

    def setdefault(self, key, value):
        self[key] = value

    def popitem(self):
        del self["other"]


def test_a_dictionary_in_the_place_of_another_is_seen():
    guards, holder = _C.Guards(), Plain()
    holder.a = 1
    guards.attributes(holder, None, None)
    assert guards.holds()
    holder.__dict__ = {"a": 2}
    assert not guards.holds()
    holder.__dict__ = {"a": 1}
    assert guards.holds()


def test_checks_are_numbered_in_order():
    guards = _C.Guards()
    first, second, cell = {"a": 1}, [1, 2], types.CellType(1)
    assert guards.mapping(first, None) == [("a", 1)]
    assert guards.items(second, list) == [1, 2]
    assert guards.cell(cell) == [1]
    assert len(guards) == 3
    del cell.cell_contents
    second[1] = 3
    assert guards.differences() == [(1, 1), (2, None)]


def test_slots():
    guards, holder = _C.Guards(), Slotted()
    assert guards.slot(holder, Slotted.x) == []
    holder.x = 1
    assert guards.difference() == (0, None)
    with pytest.raises(TypeError, match="slot"):
        guards.slot(holder, Slotted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__code__", (lambda a=1: 2).__code__),
        ("__defaults__", (2,)),
        ("__kwdefaults__", {"b": 2}),
        *((name, "other") for name in ("__name__", "__qualname__", "__doc__")),
    ],
)
def test_functions(name, value):
    def one(a=1, *, b=1):
        """One."""

    def other():
        pass

    guards, before = _C.Guards(), getattr(one, name)
    guards.function(one)
    guards.functions([other, one])
    setattr(one, name, value)
    assert guards.differences()[0] == (0, name)
    of_many = [(1, 1)] if name in ("__code__", "__defaults__") else []
    assert guards.differences()[1:] == of_many
    setattr(one, name, before)
    assert guards.holds()


def test_class_attributes_are_seen_and_forgiven():
    guards = _C.Guards()
    guards.type(Slotted, {"width"}, None)
    Slotted.other = 1
    assert guards.holds()
    Slotted.width = 1
    assert guards.difference() == (0, "width")
    del Slotted.width, Slotted.other
    assert guards.holds()


def test_a_storage_can_go_while_it_is_remembered():
    guards, tensor = _C.Guards(), torch.ones(1000)
    guards.tensor(tensor)
    for _ in range(20):  # the allocator would like to use the address again
        tensor.data = torch.ones(1000)
        assert guards.difference() == (0, "data")


def test_what_raises_does_not_hold():
    def raises(value):
        raise RuntimeError

    guards = _C.Guards()
    guards.probe(raises, None, 1)
    assert not guards.holds()
    assert guards.difference() == (0, None)


def test_functions_are_functions():
    guards = _C.Guards()
    with pytest.raises(TypeError, match=r"functions\(\) takes"):
        guards.functions([len])
    assert len(guards) == 0


@pytest.mark.parametrize("add", ["items", "cell", "function", "tensor", "type"])
def test_wrong_kinds_are_refused(add):
    guards = _C.Guards()
    more = {"items": (list,), "type": (None, None)}.get(add, ())
    with pytest.raises(TypeError, match=rf"{add}\(\) takes"):
        getattr(guards, add)(3, *more)
    assert len(guards) == 0
