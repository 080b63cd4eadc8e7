"""What the extension does to whole batches: copies, comparisons, and versions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.cpu

EVERYWHERE = _C.Addresses([0], [1 << 63])
NOWHERE = _C.Addresses([], [])


def addresses_of(*tensors):
    spans = sorted(
        (start, start + tensor.untyped_storage().nbytes())
        for tensor in tensors
        for start in [tensor.untyped_storage().data_ptr()]
    )
    return _C.Addresses(*map(list, zip(*spans, strict=True)))


def rows_at(skew, dtype=torch.float32):
    """Two rows whose memory begins so many bytes behind a place that torch would give them."""
    whole = torch.arange(64, dtype=torch.uint8)
    return whole[skew : skew + 48].view(dtype).view(2, -1)


@given(st.sampled_from([0, 4, 8, 16]), st.sampled_from([torch.float32, torch.uint8, torch.int32]))
def test_a_copy_has_the_bits_and_the_alignment_of_what_it_is_of(skew, dtype):
    rows = rows_at(skew, dtype)
    (copy,) = EVERYWHERE.copied_from([rows])
    assert torch.equal(copy.view(torch.uint8), rows.view(torch.uint8))
    assert (copy.dtype, copy.shape, copy.stride()) == (rows.dtype, rows.shape, rows.stride())
    assert copy.data_ptr() % 64 == rows.data_ptr() % 64
    assert copy.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_what_lies_elsewhere_stays_what_it_is(kind):
    here, there = torch.ones(3), torch.zeros(3)
    values = {"here": here, "name": "x", "there": there, "none": None}
    batch = dict(values) if kind is dict else kind(values.values())
    made = addresses_of(here).copied_from(batch)
    assert type(made) is kind
    assert made is not batch
    made = made if kind is dict else dict(zip(values, made, strict=True))
    assert list(made) == list(values)
    assert made["there"] is there
    assert (made["name"], made["none"]) == ("x", None)
    assert made["here"] is not here
    assert torch.equal(made["here"], here)
    assert NOWHERE.copied_from([here])[0] is here


def test_addresses_are_met_by_storages_that_begin_before_them_or_end_behind():
    tensor = torch.zeros(16)
    start = tensor.untyped_storage().data_ptr()
    for begin, end, meets in [
        (start - 8, start, False),
        (start - 8, start + 1, True),
        (start + 63, start + 99, True),
        (start + 64, start + 99, False),
    ]:
        (given,) = _C.Addresses([begin], [end]).copied_from([tensor])
        assert (given is not tensor) == meets


@pytest.mark.parametrize(
    "make",
    [
        lambda one: one,
        lambda one: [[one]],
        lambda one: [one, object()],
        lambda one: [one.t()],
        lambda one: [one.requires_grad_()],
        lambda one: [torch.nn.Parameter(one)],
        lambda one: [one[0, 0]],
        lambda one: [one.to_sparse()],
        lambda one: [one.to(torch.complex64).conj()],
        lambda one: [one, one],
        lambda one: [*one.unbind()],
    ],
)
def test_what_is_no_plain_batch_of_tensors_apart_is_left_to_others(make):
    assert EVERYWHERE.copied_from(make(torch.ones(2, 2))) is None


def test_batches_have_the_same_bits_where_all_their_parts_have():
    one = {"x": torch.tensor([1.0, float("nan")]), "n": "a"}
    assert _C.have_same_bits(one, {"x": one["x"].clone(), "n": one["n"]})
    assert _C.have_same_bits([one["x"], None], [one["x"].clone(), None])
    for other in [
        {"x": one["x"] + 1, "n": one["n"]},
        {"n": one["n"], "x": one["x"].clone()},
        {"x": one["x"].clone()},
        {"x": one["x"].clone(), "n": one["n"], "more": 1},
        [one["x"].clone(), one["n"]],
    ]:
        assert not _C.have_same_bits(one, other)
    assert not _C.have_same_bits([one["x"]], (one["x"],))
    assert not _C.have_same_bits([torch.tensor([0.0])], [torch.tensor([-0.0])])


def test_versions_tell_which_tensors_were_changed_in_place():
    first, second = torch.zeros(2), torch.zeros(2)
    batch = {"first": first, "second": second, "name": "x"}
    versions = _C.Versions(batch)
    assert versions.changed() == []
    batch.pop("first")
    first += 1
    (changed,) = versions.changed()
    assert changed is first
    with torch.inference_mode():
        unversioned = torch.zeros(2)
        versions = _C.Versions((unversioned, second))
        unversioned += 1
    assert versions.changed() == []
    assert _C.Versions([first, object()]).changed() == []


def test_batches_of_the_same_layouts_have_a_number_in_common():
    rows, labels = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    known = _C.layouts_hash((rows, labels))
    assert known == _C.layouts_hash((rows + 1, labels + 1))
    others = [[rows, labels], (labels, rows), (rows,), (rows[:3], labels), (rows.double(), labels)]
    assert known not in {_C.layouts_hash(other) for other in others}
    for other in [rows, {"x": rows}, (rows, None), (rows, torch.nn.Parameter(rows))]:
        assert _C.layouts_hash(other) is None
