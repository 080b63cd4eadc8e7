"""Batches come apart into tensors and together again."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waterflow.job.batch import UnknownLeafError, flatten, flatten_like

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass
class Open:
    x: Any
    y: Any = None


class Color(enum.Enum):
    RED = 1


PLAIN = st.one_of(
    st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.just(Color.RED), st.binary()
)
TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
)


def containers(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        pairs.map(lambda p: Point(*p)),
        pairs.map(lambda p: Frozen(*p)),
        pairs.map(lambda p: Open(*p)),
        pairs.map(lambda p: OrderedDict(a=p[0], b=p[1])),
        pairs.map(lambda p: UserDict({"a": p[0], 3: p[1]})),
    )


BATCHES = st.recursive(st.one_of(PLAIN, TENSORS), containers, max_leaves=8)


def same(left, right, tensors_equal):
    if isinstance(left, torch.Tensor):
        return tensors_equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (dict, UserDict)):
        return list(left) == list(right) and all(
            same(left[k], right[k], tensors_equal) for k in left
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(
            same(one, other, tensors_equal) for one, other in zip(left, right, strict=True)
        )
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, n), getattr(right, n), tensors_equal) for n in ("x", "y"))
    return left == right


@given(BATCHES)
def test_round_trip(batch):
    flat = flatten(batch)
    assert same(batch, flat.rebuild(flat.tensors), lambda one, other: one is other)
    assert hash(flat.signature) == hash(flatten(batch).signature)
    assert flat.signature == flatten(batch).signature


@given(BATCHES)
def test_rebuilding_around_other_tensors_leaves_the_batch_alone(batch):
    flat = flatten(batch)
    others = [tensor.clone() for tensor in flat.tensors]
    rebuilt = flatten(flat.rebuild(others))
    assert all(one is other for one, other in zip(rebuilt.tensors, others, strict=True))
    assert rebuilt.signature == flat.signature
    assert all(one is t for one, t in zip(flatten(batch).tensors, flat.tensors, strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        ([torch.zeros(2)], (torch.zeros(2),)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (Point(1, 2), (1, 2)),
        (Open(1, 2), Frozen(1, 2)),
    ],
)
def test_what_makes_another_graph(one, other):
    assert flatten(one).signature != flatten(other).signature


def test_a_number_that_is_not_equal_to_itself():
    assert flatten([float("nan")]).signature == flatten([float("nan")]).signature


@pytest.mark.parametrize(
    "thing",
    [object(), {1}, iter([]), torch.zeros(2).to_sparse(), [{"a": [object()]}], int],
    ids=lambda thing: type(thing).__name__,
)
def test_objects_that_may_hide_tensors(thing):
    with pytest.raises(UnknownLeafError):
        flatten(thing)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_laid_out_as_the_former_is_the_same_taken_apart(kind):
    former = flatten(kind([torch.zeros(2, 3), torch.arange(2)]))
    batch = kind([torch.ones(2, 3), torch.arange(2) + 1])
    quick, thorough = flatten_like(batch, former), flatten(batch)
    assert quick is not None
    assert quick.signature == thorough.signature
    assert all(map(lambda one, other: one is other, quick.tensors, thorough.tensors))
    rebuilt = quick.rebuild(quick.tensors)
    assert type(rebuilt) is kind
    assert all(one is other for one, other in zip(rebuilt, batch, strict=True))


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(2, 3), torch.arange(2)],
        (torch.zeros(2, 3),),
        (torch.zeros(2, 3), torch.arange(2), torch.arange(2)),
        (torch.zeros(2, 4), torch.arange(2)),
        (torch.zeros(3, 2).t(), torch.arange(2)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.arange(2)),
        (torch.zeros(2, 3, requires_grad=True), torch.arange(2)),
        (torch.zeros(2, 3, dtype=torch.complex64).conj().imag, torch.arange(2)),
        (torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False), torch.arange(2)),
        (torch.zeros(2, 3).to_sparse(), torch.arange(2)),
        (torch.zeros(2, 3), 5),
        Pair(torch.zeros(2, 3), torch.arange(2)),
        {"image": torch.zeros(2, 3), "label": torch.arange(2)},
        torch.zeros(2, 3),
    ],
    ids=str,
)
def test_any_other_batch_is_looked_at(batch):
    former = flatten((torch.zeros(2, 3), torch.arange(2)))
    assert flatten_like(batch, former) is None
    assert flatten_like((torch.ones(2, 3), torch.arange(2)), former) is not None


def test_what_is_known_of_a_batch_keeps_nothing_of_it():
    batch = (torch.zeros(2), torch.ones(2))
    held = weakref.ref(batch[0])
    known = dataclasses.replace(flatten(batch), tensors=[])
    del batch
    assert held() is None
    assert known.layouts is not None


class Marked(list):
    pass


class Slotted(dict):
    __slots__ = ("mark",)


@dataclasses.dataclass(slots=True)
class InSlots:
    x: Any
    y: Any = None


def marked(value: Any, mark: Any) -> Any:
    value.mark = mark
    return value


@pytest.mark.parametrize(
    "made",
    [
        lambda mark: marked(Marked([torch.ones(2)]), mark),
        lambda mark: marked(Slotted(x=torch.ones(2)), mark),
        lambda mark: marked(UserDict(x=torch.ones(2)), mark),
        lambda mark: marked(OrderedDict(x=torch.ones(2)), mark),
        lambda mark: marked(Open(torch.ones(2)), mark),
        lambda mark: InSlots(torch.ones(2), mark),
    ],
    ids=["a list", "slots", "a mapping", "an OrderedDict", "a data class", "fields in slots"],
)
def test_what_an_object_has_beside_its_items_is_in_the_twin_and_tells_it_apart(made):
    batch = made("one")
    flat = flatten(batch)
    twin = flat.rebuild([torch.zeros(2)])
    assert type(twin) is type(batch)
    assert flat.has_objects
    assert getattr(twin, "mark", getattr(twin, "y", None)) == "one"
    assert flatten(twin).signature == flat.signature == flatten(made("one")).signature
    assert flatten(made("other")).signature != flat.signature


def test_a_dictionary_with_defaults_keeps_what_makes_them():
    twin = flatten(defaultdict(list, x=torch.ones(2))).rebuild([torch.zeros(2)])
    assert twin["y"] == []
    assert twin["x"].sum() == 0


def test_contents_tell_of_every_change_of_a_container():
    tensors = [torch.ones(2), torch.ones(2)]
    flat = flatten({"x": tensors[0], "more": [tensors[1], 1.0], "open": Open(None)})
    for change in (
        lambda batch: batch.pop("x"),
        lambda batch: batch.update(x=tensors[1]),
        lambda batch: batch.update(x=torch.ones(2)),
        lambda batch: batch["more"].append(1),
        lambda batch: batch["more"].__setitem__(1, 2.0),
        lambda batch: marked(batch["open"], 1),
        lambda batch: batch.update(new=None),
    ):
        twin = flat.rebuild(tensors)
        before = flat.contents(twin, tensors)
        assert flat.contents(twin, tensors) == before is not None
        change(twin)
        assert flat.contents(twin, tensors) != before
