"""Batches of a job's data: torch's own loaders over tensors are read faster, with the same bits.

A `DataLoader` over a `TensorDataset` takes each item out of its tensor and stacks the items again,
where one `index_select` gives the same tensors. That takes the place of the loader's fetcher alone:
samplers, random draws, errors and pinning stay the loader's own. Whatever is not exactly torch's
own at that moment (a subclass, a patched function, another collation, a mode that sees operators)
is fetched by the loader's fetcher.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    dataloader,
)
from torch.utils.data._utils import collate, fetch, worker

from waterflow.account.class_parts import watch_class
from waterflow.allocator_ext import _C

#: Types whose items `stack` and `index_select` both copy as they are.
_DTYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
)

_LISTS = (list, tuple, range)
_SAMPLERS = (RandomSampler, SequentialSampler)

#: Iterators that run no code of anybody's, so it does not matter when and where they are asked.
PLAIN_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())))

#: Functions that a fetch goes through: (where, name).
_PATH: tuple[tuple[Any, str], ...] = (
    (dataloader.DataLoader, "__iter__"),
    (dataloader.DataLoader, "_get_iterator"),
    (dataloader._SingleProcessDataLoaderIter, "__next__"),
    (dataloader._SingleProcessDataLoaderIter, "_next_data"),
    (dataloader._SingleProcessDataLoaderIter, "_next_index"),
    (BatchSampler, "__iter__"),
    (RandomSampler, "__iter__"),
    (SequentialSampler, "__iter__"),
    (fetch._MapDatasetFetcher, "fetch"),
    (TensorDataset, "__getitem__"),
    (Subset, "__getitem__"),
    (Subset, "__getitems__"),
    (collate, "default_collate"),
    (collate, "collate"),
    (collate, "collate_tensor_fn"),
    (torch, "stack"),
    (torch.Tensor, "__getitem__"),
)
#: A fetch asks for nothing that makes and changes these. Lightning replaces that for a while, and
#: leaves what they had from their base behind.
_KEPT = (dataloader.DataLoader, BatchSampler)
_BEFORE = frozenset({"__init__", "__setattr__", "__delattr__"})
#: What would be in its way if it were there.
_ASIDE: tuple[tuple[Any, str], ...] = ((TensorDataset, "__getitems__"), (worker, "_worker_info"))


def _is_torchs(function: object) -> bool:
    if not isinstance(function, FunctionType):
        return isinstance(function, (BuiltinFunctionType, type(object.__str__)))
    folder = os.path.join(os.path.dirname(torch.__file__), "")
    return function.__code__.co_filename.startswith(folder)


def _guards_of_path() -> _C.Guards:
    """They hold as long as the functions are those of now, and Python runs the same for them."""
    guards = _C.Guards()
    for where, name in (*_PATH, *_ASIDE):
        if isinstance(where, type):
            watch_class(guards, where, name, _BEFORE if where in _KEPT else frozenset())
        else:
            guards.attributes(where, {name}, None)
    for where, name in _PATH:
        if isinstance(function := getattr(where, name), FunctionType):
            guards.function(function)
    guards.mapping(collate.default_collate_fn_map, None)
    return guards


_COLLATE = collate.default_collate
_COLLATIONS = collate.default_collate_fn_map
#: Somebody may have patched torch before this module came.
_PRISTINE = (
    all(_is_torchs(getattr(where, name)) for where, name in _PATH)
    and not hasattr(TensorDataset, "__getitems__")
    and worker._worker_info is None
    and _COLLATIONS.get(torch.Tensor) is collate.collate_tensor_fn
    and not any(issubclass(tuple, kind) for kind in _COLLATIONS)
)
_PATH_GUARDS = _guards_of_path()


def batches_of(data: Iterable[Any]) -> Iterator[Any]:
    """Begins an epoch of a job's data: `iter(data)`, its batches the same, made faster.

    Raises:
        Whatever the data raises.
    """
    iterator = iter(data)
    if type(iterator) is dataloader._SingleProcessDataLoaderIter and _PRISTINE:
        fetcher = iterator._dataset_fetcher
        if type(fetcher) is fetch._MapDatasetFetcher and "fetch" not in vars(fetcher):
            # The iterator is this epoch's own; nobody else has seen it.
            iterator._dataset_fetcher = _Selection(fetcher)
    return iterator


def undrawn(iterator: Iterator[Any]) -> int:
    """How many of the next batches draw no random number, and run no code but torch's own.

    A loader draws when an epoch begins, and its sampler when it is first asked. What follows, up to
    the end of the epoch, is selected from what was drawn then. So a step that draws, too, finds the
    streams the same whether these batches are made before it or after.

    Args:
        iterator: of an epoch, from `batches_of`.
    """
    if type(iterator) in PLAIN_ITERATORS:
        return operator.length_hint(iterator)
    if type(iterator) is not dataloader._SingleProcessDataLoaderIter:
        return 0
    if type(iterator._dataset_fetcher) is not _Selection or not iterator._num_yielded:
        return 0
    batches = iterator._index_sampler
    # What an iterable of its own yields, or a sampler of somebody's own, may be drawn one by one.
    if type(batches) is not BatchSampler or type(iterator._sampler_iter) is not GeneratorType:
        return 0
    sampler: Any = batches.sampler
    drawn = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if not (drawn or type(sampler) is SequentialSampler):
        return 0
    own = sampler.data_source is iterator._dataset
    if not own or iterator._dataset_fetcher.rows is None:
        return 0
    return max(0, len(batches) - iterator._num_yielded)


def in_one_go(iterator: Iterator[Any]) -> Callable[[], Any]:
    """What fetches the next batch of an iterator that has one `undrawn`, again and again: what a
    fetch depends on is looked at once, as no code but torch's own runs in between."""
    if type(iterator) in PLAIN_ITERATORS:
        return iterator.__next__
    fetcher: _Selection = iterator._dataset_fetcher  # type: ignore[attr-defined]
    rows = fetcher.rows
    return iterator.__next__ if rows is None else functools.partial(fetcher.next, iterator, rows)


def next_batch(iterator: Iterator[Any]) -> Any:
    """The next batch, as `next` makes it. Where that is torch's own code alone, by the short way:
    between two steps, which leave little of Python's in a core's caches, the loader's own takes as
    long as the rest of a small step.

    Raises:
        StopIteration: there is none.
        Whatever the data raises.
    """
    if type(iterator) is dataloader._SingleProcessDataLoaderIter:
        fetcher: Any = iterator._dataset_fetcher
        if type(fetcher) is _Selection and fetcher.is_all_of(iterator):
            rows = fetcher.rows
            if rows is not None:
                return fetcher.next(iterator, rows)
    return next(iterator)


def tensors_behind(data: Iterable[Any]) -> tuple[torch.Tensor, ...] | None:
    """The tensors whose rows a loader's batches are, where nobody's code but torch's selects them;
    None where that is not so."""
    if type(data) is not dataloader.DataLoader or not (_PRISTINE and _is_unpatched()):
        return None
    batches = data.batch_sampler
    if type(batches) is not BatchSampler or "_get_iterator" in vars(data):
        return None
    sampler: Any = batches.sampler
    if type(sampler) not in _SAMPLERS:
        return None
    return _rows_of(data.dataset) if sampler.data_source is data.dataset else None


class _Rows:
    """What a loader's batches are rows of, as long as the guards hold: of these tensors, by way of
    these subsets' indices, the outermost first."""

    def __init__(self, fetcher: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self.guards = _C.Guards()
        self.guards.attributes(fetcher, {"auto_collation", "collate_fn", "dataset"}, None)
        subsets, inner = _unwrapped(fetcher.dataset)
        for subset in subsets:
            self.guards.attributes(subset, {"dataset", "indices", "__getitems__"}, None)
        self.guards.attributes(inner, {"tensors"}, None)
        self._tensors = tensors
        self._subsets = [subset.indices for subset in subsets]
        self._has_lists = all(type(indices) in _LISTS for indices in self._subsets)

    @classmethod
    def of(cls, fetcher: Any) -> _Rows | None:
        """Of a fetcher of torch's; None where somebody else's code makes its batches, or they are
        of other data."""
        if not (fetcher.auto_collation and fetcher.collate_fn is _COLLATE):
            return None
        tensors = _rows_of(fetcher.dataset)
        return None if tensors is None else cls(fetcher, tensors)

    def select(self, indices: Any) -> list[torch.Tensor] | None:
        """What `default_collate` makes of the items; None where that is not known for sure."""
        if type(indices) is not list or any(one.dtype not in _DTYPES for one in self._tensors):
            return None
        if self._has_lists:
            return _C.select_rows(self._tensors, self._subsets, indices)
        for own in self._subsets:
            mapped = _mapped(own, indices)
            if mapped is None:
                return None
            indices = mapped
        return _C.select_rows(self._tensors, [], indices)


class _Selection:
    """In place of a loader's fetcher: selects a batch as a whole, where that is the same."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        self._rows: _Rows | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    @property
    def rows(self) -> _Rows | None:
        """Of what a batch that is fetched now is rows, by way of torch's own code alone; None where
        that is not so. What it depends on may have changed since the last one."""
        if not _is_unpatched():
            return None
        if self._rows is None or not self._rows.guards.holds():
            self._rows = _Rows.of(self._fetcher)
        return self._rows

    def is_all_of(self, iterator: Any) -> bool:
        """Whether the iterator, which is under way, does nothing but to have this fetch what one of
        torch's samplers says, and to tell a profiler, if there is one."""
        batches = iterator._index_sampler
        return bool(
            iterator._num_yielded
            and not iterator._pin_memory
            and type(batches) is BatchSampler
            and type(batches.sampler) in _SAMPLERS
            and not profiler._is_profiler_enabled
        )

    def next(self, iterator: Any, rows: _Rows) -> Any:
        """The next batch of an iterator that this is all of."""
        indices = next(iterator._sampler_iter)
        selected = rows.select(indices)
        batch = self._fetcher.fetch(indices) if selected is None else selected
        iterator._num_yielded += 1
        return batch

    def fetch(self, indices: Any) -> Any:
        """A batch."""
        rows = self.rows
        selected = None if rows is None else rows.select(indices)
        return self._fetcher.fetch(indices) if selected is None else selected


def _is_unpatched() -> bool:
    """Whether the functions are those of the beginning, and nobody watches operators."""
    return (
        _PATH_GUARDS.holds()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _rows_of(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    """The tensors whose rows a dataset's items are, by way of torch's own code alone; None where
    that is not so."""
    subsets, inner = _unwrapped(dataset)
    return _selectable(inner) if all(map(_is_plain_subset, subsets)) else None


def _unwrapped(dataset: Dataset[Any]) -> tuple[list[Subset[Any]], Dataset[Any]]:
    """The subsets around a dataset, the outermost first, and what is inside."""
    subsets: list[Subset[Any]] = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return subsets, dataset


def _is_plain_subset(subset: Subset[Any]) -> bool:
    """Whether no code but torch's own says which items it has; of a list of other things than
    whole numbers, torch's own code fetches them."""
    return "__getitems__" not in vars(subset) and _has_plain_items(subset.indices)


def _selectable(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a dataset whose rows can be selected."""
    if type(dataset) is not TensorDataset or hasattr(dataset, "__getitems__"):
        return None
    tensors = dataset.tensors
    if type(tensors) is not tuple or not tensors or not all(map(_is_plain, tensors)):
        return None
    return tensors


def _are_whole_numbers(indices: Any) -> bool:
    return type(indices) is list and set(map(type, indices)) == {int}


def _mapped(own: Any, indices: Any) -> list[Any] | None:
    """Items of a plain subset's indices, as whole numbers where an array or a tensor holds them."""
    if not (_are_whole_numbers(indices) and _has_plain_items(own)):
        return None
    try:
        found = [own[index] for index in indices]
    except IndexError:  # the loader's own fetch raises it again
        return None
    return found if type(own) in _LISTS else [int(item) for item in found]


def _has_plain_items(own: Any) -> bool:
    if type(own) in _LISTS:
        return True
    if type(own) is np.ndarray:
        return own.ndim == 1 and own.dtype.kind == "i"
    return type(own) is torch.Tensor and own.dim() == 1 and own.dtype == torch.int64


def _is_plain(tensor: Any) -> bool:
    """Whether rows of the tensor, stacked, are what `index_select` gives."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _DTYPES
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and _C.has_plain_rows(tensor)
    )
