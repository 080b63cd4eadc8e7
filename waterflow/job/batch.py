"""Batches as users make them: nested containers taken apart into tensors and put together again."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.allocator_ext import _C
from waterflow.job.batch_reads import BatchReads
from waterflow.job.epochs import MicroBatches

#: Leaves that are part of a step graph's identity: another value is another graph.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), Enum, torch.dtype, torch.device)

Rebuild = Callable[[Sequence[torch.Tensor]], Any]


class UnknownLeafError(TypeError):
    """A batch holds an object that may hide tensors; ``args[0]`` is its type's name."""


@dataclasses.dataclass(eq=False)  # frozen, it would take three times as long to make each
class FlatBatch:
    """A batch taken apart; nobody changes it.

    Attributes:
        tensors: its tensors, in a fixed order.
        signature: equal for two batches exactly if one step graph serves both.
        rebuild: makes the same batch around other tensors.
        reads: what is taken apart of it; None: all.
        layouts: of a list or a tuple of tensors alone, the extension's form of the signature.
    """

    tensors: list[torch.Tensor]
    signature: Hashable
    rebuild: Rebuild
    reads: BatchReads | None = None
    layouts: Any = None


def flatten(batch: Any, reads: BatchReads | None = None) -> FlatBatch:
    """Takes a batch apart.

    Args:
        batch: as the data yields it.
        reads: what the step can read of it. The rest is left as it is, is no part of the signature
            and may be of any kind.

    Raises:
        UnknownLeafError: the batch holds something other than tensors, plain values, sequences,
            mappings and data classes.
    """
    tensors: list[torch.Tensor] = []
    signature, rebuild = _flatten_read(batch, tensors, reads)
    layouts = None
    if type(batch) in (list, tuple) and len(tensors) == len(batch):
        own = all(map(operator.is_, tensors, batch))
        if own and all(type(one) is torch.Tensor and _C.has_plain_bits(one) for one in tensors):
            layouts, rebuild = _C.Layouts(batch), type(batch)  # which keep nothing of this one
    return FlatBatch(tensors, signature, rebuild, reads, layouts)


def _flatten_read(
    batch: Any, tensors: list[torch.Tensor], reads: BatchReads | None
) -> tuple[Hashable, Rebuild]:
    if type(batch) is MicroBatches:
        parts = [_flatten_read(part, tensors, reads) for part in batch]
        signature = (MicroBatches, tuple(part[0] for part in parts))
        return signature, lambda replaced: MicroBatches(part[1](replaced) for part in parts)
    unread = frozenset() if reads is None else reads.unread(batch)
    if type(batch) is dict:
        return _flatten_mapping(batch, tensors, unread)
    if type(batch) in (list, tuple):
        return _flatten_sequence(batch, tensors, unread)
    return _flatten(batch, tensors)


def flatten_like(batch: Any, former: FlatBatch) -> FlatBatch | None:
    """What `flatten` makes of a batch that is laid out as one before, quickly.

    Args:
        batch: as the data yields it.
        former: of a batch before, with the same reads.

    Returns:
        None where the batch is no plain list or tuple of plain tensors, laid out as the former's.
    """
    if former.layouts is None or not former.layouts.are_of(batch):
        return None
    return FlatBatch(list(batch), former.signature, former.rebuild, former.reads, former.layouts)


def moved(batch: Any, device: torch.device, reads: BatchReads | None = None) -> Any:
    """The batch with its tensors on a device; as it is where they are, or may hide.

    What the step cannot read of it stays where it is.
    """
    if device.type == "cpu":
        return batch
    try:
        flat = flatten(batch, reads)
    except UnknownLeafError:
        return batch
    return flat.rebuild([tensor.to(device) for tensor in flat.tensors])


def _flatten(value: Any, tensors: list[torch.Tensor]) -> tuple[Hashable, Rebuild]:
    if isinstance(value, torch.Tensor):
        return _flatten_tensor(value, tensors)
    if isinstance(value, _PLAIN):
        return (type(value), _identity(value)), lambda _: value
    if isinstance(value, Mapping):
        return _flatten_mapping(value, tensors)
    if isinstance(value, (list, tuple)):
        return _flatten_sequence(value, tensors)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _flatten_dataclass(value, tensors)
    raise UnknownLeafError(f"{type(value).__module__}.{type(value).__qualname__}")


def _identity(value: Any) -> Hashable:
    """Floats by their digits: 0.0 is not -0.0, and every NaN serves as another."""
    return repr(value) if isinstance(value, (float, complex)) else value  # type: ignore[no-any-return]


def _flatten_tensor(value: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[Hashable, Rebuild]:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    if value.is_conj() or value.is_neg():
        raise UnknownLeafError(f"{type(value).__qualname__} that is a lazily conjugated view")
    if value.requires_grad:
        raise UnknownLeafError(f"{type(value).__qualname__} that asks for a gradient")
    if not plain or value.layout != torch.strided:
        raise UnknownLeafError(f"{type(value).__qualname__} with layout {value.layout}")
    index = len(tensors)
    tensors.append(value)
    signature = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
    return signature, lambda replaced: replaced[index]


def _left(value: Any) -> tuple[Hashable, Rebuild]:
    return ("unread",), lambda _: value


def _flatten_mapping(
    value: Any, tensors: list[torch.Tensor], unread: Collection[Any] = ()
) -> tuple[Hashable, Rebuild]:
    parts = {
        key: _left(item) if key in unread else _flatten(item, tensors)
        for key, item in value.items()
    }
    signature = (type(value), tuple((key, part[0]) for key, part in parts.items()))

    def rebuild(replaced: Sequence[torch.Tensor]) -> Any:
        items = {key: part[1](replaced) for key, part in parts.items()}
        if type(value) is dict:
            return items
        # A mapping with a type of its own (a tokenizer's encoding) keeps it. One level deeper
        # than a shallow copy, for UserDict keeps its items in an attribute.
        twin = copy.copy(value)
        if "data" in getattr(twin, "__dict__", {}):
            twin.data = dict(twin.data)
        for key, item in items.items():
            twin[key] = item
        return twin

    return signature, rebuild


def _flatten_sequence(
    value: Any, tensors: list[torch.Tensor], unread: Collection[int] = ()
) -> tuple[Hashable, Rebuild]:
    parts = [
        _left(item) if position in unread else _flatten(item, tensors)
        for position, item in enumerate(value)
    ]
    signature = (type(value), tuple(part[0] for part in parts))

    def rebuild(replaced: Sequence[torch.Tensor]) -> Any:
        items = [part[1](replaced) for part in parts]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)

    return signature, rebuild


def _flatten_dataclass(value: Any, tensors: list[torch.Tensor]) -> tuple[Hashable, Rebuild]:
    names = [field.name for field in dataclasses.fields(value)]
    parts = {name: _flatten(getattr(value, name), tensors) for name in names}
    signature = (type(value), tuple((name, part[0]) for name, part in parts.items()))

    def rebuild(replaced: Sequence[torch.Tensor]) -> Any:
        twin = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(twin, name, part[1](replaced))
        return twin

    return signature, rebuild
