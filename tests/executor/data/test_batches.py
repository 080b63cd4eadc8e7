"""Batches that are selected as a whole are those that the loader itself would have made."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from waterflow.executor.data import batches
from waterflow.executor.data.batches import batches_of

pytestmark = pytest.mark.cpu

SHAPES = [(), (1,), (3,), (0,), (1, 1, 1), (3, 4, 5), (1, 4, 4), (4, 1, 1), (2, 3, 4, 5)]
DTYPES = sorted(batches._DTYPES, key=str)


def rows(dtype, *shape):
    bits = torch.randint(256, (23, *shape, torch.empty((), dtype=dtype).element_size()))
    if dtype is torch.bool:
        bits %= 2
    return bits.to(torch.uint8).view(dtype).reshape(23, *shape)


def dataset():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return TensorDataset(rows(torch.float32, 3), rows(torch.int64))


def look(value):
    """All that a step could see of a batch, its bits included."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return (
            type(value),
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.untyped_storage().nbytes(),
            value._version,
            value.requires_grad,
            value.is_pinned(),
            value.is_inference(),
            raw.tolist(),
        )
    if isinstance(value, (list, tuple)):
        return type(value), [look(item) for item in value]
    if isinstance(value, dict):
        return type(value), {key: look(item) for key, item in value.items()}
    return type(value), value


def epoch(loader, begin):
    """An epoch's batches, how it ended, and the random stream after it."""
    torch.manual_seed(3)
    found = []
    try:
        for batch in begin(loader):
            found.append(look(batch))
    except Exception as error:
        found.append((type(error), str(error)))
    return found, torch.get_rng_state().tolist()


class Short:
    """An epoch, each batch of it by `next_batch`."""

    def __init__(self, loader):
        self.iterator = batches_of(loader)

    def __iter__(self):
        return self

    def __next__(self):
        return batches.next_batch(self.iterator)


@pytest.fixture
def selected(monkeypatch):
    """Counts batches that were selected as a whole."""
    counted = []
    original = batches._Rows.select

    def select(*given):
        found = original(*given)
        if found is not None:
            counted.append(found)
        return found

    monkeypatch.setattr(batches._Rows, "select", select)
    return counted


def assert_same(make, selected, fast):
    """A loader's epochs are equal either way, and selected as a whole exactly where `fast`."""
    one, other = make(), make()
    for begin in (batches_of, Short, batches_of):
        assert epoch(one, iter) == epoch(other, begin)
    assert bool(selected) == fast


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape(dtype, selected):
    for shape in SHAPES:
        tensors = TensorDataset(rows(dtype, *shape), rows(torch.int64))
        assert_same(lambda t=tensors: DataLoader(t, batch_size=4, shuffle=True), selected, True)


LOADERS = {
    "in order": lambda d: DataLoader(d, batch_size=5),
    "shuffled": lambda d: DataLoader(d, batch_size=5, shuffle=True),
    "drop_last": lambda d: DataLoader(d, batch_size=5, shuffle=True, drop_last=True),
    "of one": lambda d: DataLoader(d, shuffle=True),
    "larger than all": lambda d: DataLoader(d, batch_size=100),
    "batch_sampler": lambda d: DataLoader(
        d, batch_sampler=BatchSampler(SubsetRandomSampler(range(7)), 3, drop_last=True)
    ),
    "sampler": lambda d: DataLoader(d, batch_size=4, sampler=SubsetRandomSampler([0, 5, 5, 9])),
    "replacement": lambda d: DataLoader(
        d, batch_size=4, sampler=data.RandomSampler(d, replacement=True, num_samples=11)
    ),
    "generator": lambda d: DataLoader(
        d, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_way_to_sample(name, selected):
    assert_same(lambda: LOADERS[name](dataset()), selected, True)


SUBSETS = {
    "list": lambda d: Subset(d, [4, 2, 2, 9, 0]),
    "range": lambda d: Subset(d, range(20, 0, -3)),
    "tuple": lambda d: Subset(d, (1, 3, 5)),
    "array": lambda d: Subset(d, np.array([5, 1, 7, 3])),
    "tensor": lambda d: Subset(d, torch.tensor([5, 1, 7, 3])),
    "nested": lambda d: Subset(Subset(d, np.arange(20)[::-1]), [3, 1, 4, 1, 5]),
    "random_split": lambda d: data.random_split(d, [13, 10], torch.Generator().manual_seed(1))[0],
}


@pytest.mark.parametrize("name", SUBSETS)
def test_subsets(name, selected):
    assert_same(
        lambda: DataLoader(SUBSETS[name](dataset()), batch_size=2, shuffle=True), selected, True
    )


class OwnDataset(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor[index] * 2 for tensor in self.tensors)


class OwnSubset(Subset):
    def __getitems__(self, indices):
        return [self.dataset[0] for _ in indices]


class OwnTensor(torch.Tensor):
    pass


class OwnLoader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield [tensor + 1 for tensor in batch]


def with_getitems(made):
    made.__getitems__ = lambda indices: [(torch.ones(2),) for _ in indices]
    return made


def tensors_with(value):
    return DataLoader(TensorDataset(value), batch_size=4)


OTHERS = {
    "a dataset of one's own": lambda: DataLoader(OwnDataset(*dataset().tensors), batch_size=4),
    "a subset of one's own": lambda: DataLoader(OwnSubset(dataset(), range(9)), batch_size=4),
    "items by a method of one's own": lambda: DataLoader(with_getitems(dataset()), batch_size=4),
    "a collation of one's own": lambda: DataLoader(dataset(), batch_size=4, collate_fn=len),
    "no batches": lambda: DataLoader(dataset(), batch_size=None),
    "a list": lambda: DataLoader([torch.ones(2)] * 9, batch_size=4),
    "subset of a list": lambda: DataLoader(Subset([1.5, 2.5, 3.5], [0, 2]), batch_size=2),
    "negative indices": lambda: DataLoader(dataset(), batch_sampler=[[-1, 2], [3, -4]]),
    "negative in a subset": lambda: DataLoader(Subset(dataset(), [-1, 2]), batch_size=2),
    "indices beyond": lambda: DataLoader(dataset(), batch_sampler=[[99]]),
    "subset's indices beyond": lambda: DataLoader(Subset(dataset(), [99, 1]), batch_size=2),
    "beyond the subset": lambda: DataLoader(Subset(dataset(), [9]), batch_sampler=[[1]]),
    "empty batch": lambda: DataLoader(dataset(), batch_sampler=[[]]),
    "a slice": lambda: DataLoader(dataset(), batch_sampler=[[slice(0, 2)]]),
    "booleans": lambda: DataLoader(dataset(), batch_sampler=[[True, False]]),
    "tensors as indices": lambda: DataLoader(dataset(), batch_sampler=[torch.tensor([1, 2])]),
    "gradients": lambda: tensors_with(torch.ones(9, 2, requires_grad=True)),
    "tensors of a class": lambda: tensors_with(torch.ones(9, 2).as_subclass(OwnTensor)),
    "transposed": lambda: tensors_with(torch.arange(12.0).reshape(3, 4).T),
    "conjugated": lambda: tensors_with(torch.full((9, 2), 1 + 2j).conj()),
    "sparse": lambda: tensors_with(torch.eye(9).to_sparse()),
    "a subclass of the loader": lambda: OwnLoader(dataset(), batch_size=4),
    "iterable": lambda: DataLoader(data.ChainDataset([]), batch_size=4),
    "no loader": lambda: [torch.ones(2)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_the_loaders_own(name, selected):
    assert_same(OTHERS[name], selected, False)


@contextlib.contextmanager
def code_of(function, other):
    before = function.__code__
    function.__code__ = other.__code__
    try:
        yield
    finally:
        function.__code__ = before


def patches():
    def twice(self, index):
        return tuple(tensor[index] * 2 for tensor in self.tensors)

    def stack(tensors, dim=0, out=None):
        return torch.cat([tensor.unsqueeze(0) for tensor in tensors]) * 3

    collate = torch.utils.data._utils.collate
    own_map = {tuple: lambda batch, collate_fn_map: "mine"}
    yield mock.patch.object(TensorDataset, "__getitem__", twice)
    yield mock.patch.object(
        TensorDataset, "__getitems__", return_value=[(torch.ones(1),)], create=True
    )
    yield mock.patch.object(Subset, "__getitems__", return_value=[(torch.ones(1),)])
    yield mock.patch.object(torch, "stack", stack)
    yield mock.patch.dict(collate.default_collate_fn_map, own_map)
    yield mock.patch.object(collate, "collate_tensor_fn", stack)
    yield mock.patch.object(collate, "collate", return_value="mine")
    yield code_of(TensorDataset.__getitem__, twice)


@pytest.mark.parametrize("number", range(8))
def test_patches_count_from_the_next_batch_on(number, selected):
    def read(begin):
        iterator = begin(DataLoader(Subset(dataset(), range(20)), batch_size=4))
        before = look(next(iterator))
        with next(itertools.islice(patches(), number, None)):
            during = look(next(iterator))
        return before, during, look(next(iterator))

    before, during, after = read(iter)
    for begin in (batches_of, Short):
        assert read(begin) == (before, during, after)
    assert len(selected) == 4
    made = dataset()
    assert during != look([tensor[4:8] for tensor in made.tensors]), "a patch that does nothing"


@pytest.mark.parametrize(
    "kept", [lambda it: torch.save(it, io.BytesIO()), copy.deepcopy, pickle.dumps, copy.copy]
)
def test_to_copy_what_a_batch_is_made_of_changes_nothing(kept, selected):
    loader = DataLoader(Subset(dataset(), range(20)), batch_size=4)
    for kind in (torch.Tensor, Subset, TensorDataset, DataLoader, BatchSampler):
        if "__slotnames__" in vars(kind):  # written by the first copy
            del kind.__slotnames__
    iterator = batches_of(loader)
    next(iterator)
    kept([loader, loader.dataset, torch.ones(1)])
    batches.next_batch(iterator)
    assert len(selected) == 2


@pytest.mark.parametrize("begin", [batches_of, Short])
def test_changes_of_the_data_count_from_the_next_batch_on(begin, selected):
    made = dataset()
    iterator = begin(DataLoader(made, batch_size=4))
    next(iterator)
    made.tensors = tuple(tensor + 1 for tensor in made.tensors)
    assert torch.equal(next(iterator)[0], made.tensors[0][4:8])
    made.tensors[0].mul_(2)
    assert torch.equal(next(iterator)[0], made.tensors[0][8:12])
    made.tensors[0].requires_grad_()
    assert next(iterator)[0].requires_grad
    made.tensors = (OwnTensor(made.tensors[0].detach()),)
    assert type(next(iterator)[0]) is OwnTensor
    assert len(selected) == 3


@pytest.mark.parametrize("begin", [batches_of, Short])
def test_changes_of_a_subset_count_from_the_next_batch_on(begin, selected):
    made, order = dataset(), list(range(20))
    outer = Subset(Subset(made, order), range(20))
    iterator = begin(DataLoader(outer, batch_size=4))
    next(iterator)
    order[4:8] = [0, 1, np.int64(1), 2]
    assert torch.equal(next(iterator)[0], made.tensors[0][[0, 1, 1, 2]])
    outer.indices = np.arange(20)[::-1].copy()
    assert torch.equal(next(iterator)[0], made.tensors[0][[11, 10, 9, 8]])
    outer.dataset = made
    assert torch.equal(next(iterator)[0], made.tensors[0][[7, 6, 5, 4]])
    outer.__getitems__ = lambda indices: [(torch.zeros(1),)] * len(indices)
    assert torch.equal(next(iterator)[0], torch.zeros(4, 1))
    assert len(selected) == 3, "not where an index is no whole number, nor what is the subset's own"


@pytest.mark.parametrize("begin", [batches_of, Short])
def test_types_that_change_in_place_count_from_the_next_batch_on(begin, selected):
    made, order = dataset(), np.arange(20)
    iterator = begin(DataLoader(Subset(made, order), batch_size=4))
    next(iterator)
    made.tensors[0].data = made.tensors[0].to(torch.float8_e4m3fn)
    assert next(iterator)[0].dtype is torch.float8_e4m3fn
    order.dtype = np.float64
    with pytest.raises(IndexError):
        next(iterator)
    assert len(selected) == 1


def test_a_profiler_is_told_of_each_batch():
    iterator = Short(DataLoader(dataset(), batch_size=4))
    next(iterator)
    with torch.profiler.profile() as seen:
        next(iterator)
    assert any("DataLoader" in event.key for event in seen.key_averages())


def test_a_batch_is_memory_of_its_own():
    made = dataset()
    kept = look(made.tensors)[1]
    for batch in batches_of(DataLoader(made, batch_size=4)):
        for tensor in batch:
            tensor.zero_()
    assert look(made.tensors)[1] == kept


def test_a_mode_sees_the_loaders_operators(selected):
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    with Names() as names:
        next(batches_of(DataLoader(dataset(), batch_size=4)))
    assert torch.stack in names.seen
    assert not selected


def test_inference_mode(selected):
    with torch.inference_mode():
        assert_same(lambda: DataLoader(dataset(), batch_size=4), [1], True)


def drawn_by(make):
    """The random stream's state after `make`."""
    make()
    return torch.get_rng_state().tolist()


def test_in_one_go_it_is_looked_once_what_a_fetch_depends_on(monkeypatch, selected):
    loader = LOADERS["shuffled"](dataset())
    torch.manual_seed(3)
    alone = [look(batch) for batch in loader]
    torch.manual_seed(3)
    iterator, looks = batches_of(loader), []
    found = [look(next(iterator))]
    unpatched = batches._is_unpatched
    monkeypatch.setattr(batches, "_is_unpatched", lambda: looks.append(0) or unpatched())
    fetch = batches.in_one_go(iterator)
    found += [look(fetch()) for _ in range(2)]
    assert len(looks) == 1
    monkeypatch.setattr(batches.collate, "default_collate", None)
    found += [look(next(iterator)) for _ in range(len(alone) - 3)]
    assert len(looks) == len(alone) - 2, "and each time again afterwards"
    assert found == alone


@pytest.mark.parametrize("name", ["in order", "shuffled", "drop_last", "of one", "larger than all"])
def test_what_follows_an_epochs_first_batch_draws_nothing(name):
    make = LOADERS[name]
    torch.manual_seed(3)
    alone = [look(batch) for batch in make(dataset())]
    torch.manual_seed(3)
    iterator = batches_of(make(dataset()))
    assert batches.undrawn(iterator) == 0
    found, left = [look(next(iterator))], len(alone) - 1
    while left:
        assert batches.undrawn(iterator) == left
        before = torch.get_rng_state().tolist()
        fetch = batches.in_one_go(iterator)
        found.append(look(fetch()))
        assert drawn_by(lambda: None) == before
        left -= 1
    assert batches.undrawn(iterator) == 0
    assert found == alone
    assert next(iterator, None) is None


class OwnSampler(data.RandomSampler):
    """Somebody's own."""


DRAWING = {
    "replacement": LOADERS["replacement"],
    "a generator of the loader's": LOADERS["generator"],
    "another sampler": LOADERS["sampler"],
    "batch_sampler": LOADERS["batch_sampler"],
    "a sampler of one's own": lambda d: DataLoader(d, batch_size=4, sampler=OwnSampler(d)),
    "a dataset of one's own": lambda d: DataLoader(OwnDataset(*d.tensors), 4, shuffle=True),
    "a collation of one's own": lambda d: DataLoader(d, 4, shuffle=True, collate_fn=lambda b: b),
    "tensors that are not plain": lambda d: DataLoader(
        TensorDataset(d.tensors[0].clone().requires_grad_()), 4, shuffle=True
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_whatever_else_may_draw_for_each_batch(name):
    iterator = batches_of(DRAWING[name](dataset()))
    next(iterator)
    assert batches.undrawn(iterator) == 0


def test_what_is_patched_amid_an_epoch_may_draw(monkeypatch):
    iterator = batches_of(DataLoader(dataset(), 4, shuffle=True))
    next(iterator)
    assert batches.undrawn(iterator) > 0
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: torch.randn(3))
    assert batches.undrawn(iterator) == 0


@pytest.mark.parametrize("kind", [DataLoader, BatchSampler])
def test_what_a_class_has_from_its_base_may_be_its_own(kind, monkeypatch):
    """Lightning leaves it so behind, when it has watched how loaders are made."""
    iterator = batches_of(DataLoader(dataset(), 4, shuffle=True))
    next(iterator)
    monkeypatch.setattr(kind, "__delattr__", object.__delattr__)
    assert batches.undrawn(iterator) > 0
    assert batches.tensors_behind(DataLoader(dataset(), 4)) is not None


def test_the_tensors_behind_a_loader():
    tensors = dataset()
    assert batches.tensors_behind(DataLoader(Subset(tensors, [1]))) is tensors.tensors
    assert batches.tensors_behind(DataLoader(OwnDataset(*tensors.tensors))) is None
    assert batches.tensors_behind([1]) is None


def test_a_list_draws_nothing():
    iterator = batches_of([1, 2, 3])
    assert batches.undrawn(iterator) == 3
    fetch = batches.in_one_go(iterator)
    assert fetch() == 1
    assert batches.undrawn(iterator) == 2
    assert batches.undrawn(iter({1: 2})) == 0
    assert batches.undrawn(number for number in range(3)) == 0
