"""Footprints by batch size: what three captures tell is what a capture at that size would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import waterflow as wf
from tests.support.data import cross_entropy, squares
from waterflow.capture import optimizer_cache
from waterflow.capture.optimizer import trace_optimizer
from waterflow.common import environment
from waterflow.common.errors import ConstantShapesError, RunOnlyError
from waterflow.study import batch_scaling
from waterflow.study.batch_scaling import footprint_model
from waterflow.study.footprint import forecast

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache; and this package's own files may be edited while a test runs."""
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "_OWN_PACKAGES", ())


@pytest.fixture
def captures(monkeypatch):
    """Counts captures."""
    counted = []

    def counting(built, *rest):
        counted.append(built.batch.tensors[0].shape[0])
        return original(built, *rest)

    original = batch_scaling.capture_built
    monkeypatch.setattr(batch_scaling, "capture_built", counting)
    return counted


def same(one, other):
    assert one.persistent_bytes == other.persistent_bytes
    assert one.boundary == other.boundary
    for left, right in ((one.first, other.first), (one.steady, other.steady)):
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left.events, right.events)
            assert left.num_nodes == right.num_nodes
    np.testing.assert_array_equal(one.flops, other.flops)
    np.testing.assert_array_equal(one.moved_bytes, other.moved_bytes)


def job(model, data, loss=cross_entropy, optimizer=None):
    made = optimizer or optim.SGD(model.parameters(), lr=0.1)
    return wf.Job("made", model=model, optimizer=made, loss=loss, data=data)


def images(batch):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )
    return job(model, [(torch.randn(batch, 3, 8, 8), torch.randint(5, (batch,)))])


def rows(batch):
    return job(nn.Linear(4, 3), [(torch.randn(batch, 4), torch.randint(3, (batch,)))])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 50)

    def forward(self, ids):
        x = self.words(ids)
        query, key, value = (
            self.mix(self.norm(x)).unflatten(-1, (6, 2, 2)).permute(2, 0, 3, 1, 4)[:3]
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return self.out(F.dropout(mixed.transpose(1, 2).repeat(1, 1, 1, 2).flatten(2), 0.1) + x)


def sentences(batch):
    model = Attention()

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten())

    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return job(model, [{"ids": torch.randint(50, (batch, 6))}], loss, optimizer)


@pytest.mark.parametrize("make", [images, sentences])
def test_a_line_through_two_captures_is_right_everywhere(make, captures):
    found = footprint_model(make, name="mine")
    assert found.is_affine
    assert captures == [7, 13, 61]
    same(found.at(40), forecast(lambda: make(40)))
    assert found.at(9).name == "mine"
    assert len(captures) == 3
    assert found.at(10_000).steady.transient_peak_bytes > 10_000 * 64


def test_a_batch_of_one_is_captured(captures):
    """Its dimension of one makes every order of dimensions contiguous: a copy less here."""

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x):
            return self.net(x.transpose(0, 1).contiguous().flatten(1).unflatten(1, (-1, 4)))

    def make(batch):
        return job(TimeFirst(), [torch.randn(batch, 6, 4)], squares)

    found = footprint_model(make, name="mine")
    assert found.is_affine
    for batch in (1, 2):
        same(found.at(batch), forecast(lambda batch=batch: make(batch)))
    assert found.at(1).steady.num_nodes < found.at(2).steady.num_nodes
    assert captures == [7, 13, 61, 1]


def contrastive(batch):
    """Compares every sample with every other one: memory grows with the square of the batch."""

    def loss(model, x):
        y = model(x)
        return F.cross_entropy(y @ y.t(), torch.arange(len(x)))

    return job(nn.Linear(4, 4), [torch.randn(batch, 4)], loss)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x).sin().exp() if len(x) > 50 else self.net(x)


def branching(batch):
    return job(Branching(), [torch.randn(batch, 4)], squares)


def rounding(batch):
    """Pads to whole tens: no line."""
    return job(nn.Linear(4, 4), [torch.randn(-(-batch // 10) * 10, 4)], squares)


@pytest.mark.parametrize("make", [contrastive, branching, rounding])
def test_where_there_is_no_line_each_size_is_captured_once(make, captures):
    found = footprint_model(make, name="mine")
    assert not found.is_affine
    del captures[:]
    for batch in (2, 70, 2):
        same(found.at(batch), forecast(lambda batch=batch: make(batch)))
    assert len(captures) == 2
    again = footprint_model(make, name="mine")
    assert not again.is_affine
    same(again.at(70), found.at(70))
    assert len(captures) == 2, "the second family has found everything on disk"


def test_footprints_are_rounded_after_they_are_computed(captures):
    small, large = (footprint_model(rows, name="mine", alignment=size) for size in (1, 512))
    assert captures == [7, 13, 61], "sizes are kept unrounded, for every alignment"
    one, other = small.at(3), large.at(3)
    np.testing.assert_array_equal(
        other.steady.events["bytes"], np.sign(one.steady.events["bytes"]) * up(one, 512)
    )
    assert one.persistent_bytes < other.persistent_bytes
    assert other.persistent_bytes % 512 == 0


def up(footprint, alignment):
    return -(-abs(footprint.steady.events["bytes"]) // alignment) * alignment


def test_numbers_do_not_overflow():
    found = footprint_model(rows, name="mine", alignment=1)
    small, huge = found.at(1000), found.at(1_000_000_000_000)
    peaks = [f.steady.transient_peak_bytes for f in (small, huge)]
    assert peaks[1] > 9.9e8 * peaks[0]
    assert huge.flops.min() >= 0
    with pytest.raises(wf.JobError, match=r"a batch size of 1000000000000000000 .*no machine"):
        found.at(10**18)


@pytest.mark.parametrize("batch", [0, -3, 2.0, True, "8", None])
def test_batch_sizes_are_whole_numbers_above_zero(batch):
    found = batch_scaling.FootprintModel(rows, "mine", 64, None, None)
    with pytest.raises(wf.JobError, match="'mine': the batch size must be a whole number above 0"):
        found.at(batch)


def test_data_that_ignores_the_batch_size_is_an_error():
    def ignoring(batch):
        return rows(8)

    with pytest.raises(ConstantShapesError, match=r"'mine': its shapes do not depend.*ignoring"):
        footprint_model(ignoring, name="mine")


def by_eights(batch):
    if batch % 8:
        raise ValueError(f"{batch} is no multiple of 8")
    return rows(batch)


def test_a_factory_may_refuse_some_sizes(captures):
    found = footprint_model(by_eights, name="mine")
    assert found.is_affine
    assert captures == [8, 24, 64]
    same(found.at(16), forecast(lambda: by_eights(16)))
    with pytest.raises(wf.JobError, match="ValueError: 1 is no multiple of 8"):
        found.at(1)


def odd_groups(batch):
    """The step itself needs an even number of samples."""
    loss = lambda model, x: model(x.unflatten(0, (-1, 2))).square().mean()  # noqa: E731
    return job(nn.Linear(4, 4), [torch.randn(batch, 4)], loss)


def test_a_step_may_refuse_some_sizes(captures):
    found = footprint_model(odd_groups, name="mine")
    assert found.is_affine
    assert captures[-3:] == [8, 24, 64]


def refuses(batch):
    raise OSError(f"no data for {batch}")


def test_the_first_error_is_the_one_that_is_told():
    with pytest.raises(wf.JobError, match=r"factory refuses .*OSError: no data for 7"):
        footprint_model(refuses, name="mine")


def test_what_can_only_be_run_is_tried_once(captures):
    def make(batch):
        made = rows(batch)
        made.capture = False
        return made

    with pytest.raises(RunOnlyError):
        footprint_model(make, name="mine")
    assert captures == [7]


def test_jobs_that_differ_in_more_than_their_batch_share_no_optimizer_trace():
    """A momentum for large batches only: the line must not hide it."""

    def make(batch):
        model = nn.Linear(4, 3)
        made = optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if batch > 40 else 0.0)
        return job(model, [(torch.randn(batch, 4), torch.randint(3, (batch,)))], optimizer=made)

    found = footprint_model(make, name="mine")
    assert not found.is_affine
    assert found.at(41).first is not None
    assert found.at(40).first is None


def test_traces_of_the_optimizer_are_shared(monkeypatch):
    traced = []

    def counting(*args):
        traced.append(args)
        return trace_optimizer(*args)

    monkeypatch.setattr(optimizer_cache, "trace_optimizer", counting)
    footprint_model(rows, name="mine")
    assert len(traced) == 1
