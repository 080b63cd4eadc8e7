"""Batches as users make them: nested containers taken apart into tensors and put together again."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from waterflow.account.class_parts import (
    CLASS_NOISE,
    IdentityKey,
    base_of,
    own_attributes,
    slots_of,
)
from waterflow.account.structure import complex_bits, float_bits
from waterflow.account.trust import is_trusted_class
from waterflow.allocator_ext import _C
from waterflow.job.batch_reads import BatchReads
from waterflow.job.epochs import MicroBatches

#: Leaves that are part of a step graph's identity: another value is another graph.
_PLAIN: tuple[type, ...] = (
    *(int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size),
)
_PLAIN_IDS = frozenset(map(id, _PLAIN))
#: What a value is, but for what its class makes of that.
_TOLD: dict[type, Callable[[Any], Hashable]] = {
    **{int: int.__index__, float: float_bits, complex: complex_bits},
    **{str: str.__str__, bytes: bytes.__repr__},
}
_TOLD_KINDS = tuple(_TOLD)
#: What every member of an enumeration has.
_OF_MEMBERS = frozenset({"_name_", "_value_", "_sort_order_", "__objclass__"})

Rebuild = Callable[[Sequence[torch.Tensor]], Any]
Ask = Callable[[Sequence[torch.Tensor]], Hashable]


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
        has_objects: whether it holds objects of classes that are not Python's or torch's own. What
            they are told apart by may be changed until the step.
        answers: what its tensors' values are asked by the step, and answers, which is part of the
            signature.
    """

    tensors: list[torch.Tensor]
    signature: Hashable
    rebuild: Rebuild
    reads: BatchReads | None = None
    layouts: Any = None
    has_objects: bool = False
    answers: tuple[tuple[Ask, Hashable], ...] = ()

    def gives(self, answers: Iterable[tuple[Ask, Hashable]]) -> bool:
        """Whether its values answer so now."""
        return all(ask(self.tensors) == answer for ask, answer in answers)

    def answering(self, ask: Ask) -> FlatBatch:
        """The same batch, told apart from others by one more answer, too."""
        answer = ask(self.tensors)
        answers, signature = (*self.answers, (ask, answer)), (self.signature, answer)
        return dataclasses.replace(self, signature=signature, answers=answers)

    def contents(self, twin: Any, tensors: Sequence[torch.Tensor]) -> Hashable:
        """What a batch that was rebuilt around these tensors holds, to see whether a step changes
        it; None once it holds what it could not be told from."""
        found = _Tensors()
        found.given = {id(tensor): number for number, tensor in enumerate(tensors)}
        try:
            signature, _ = _flatten_read(twin, found, self.reads)
        except UnknownLeafError:
            return None
        return signature


class _Tensors(list[torch.Tensor]):
    """Those that were found in a batch, each once.

    Attributes:
        has_objects: as in `FlatBatch`.
        given: the numbers of the only ones that there may be, by their identities; None: any.
        numbers: the numbers of those that were found, by their identities.
        packed: see `flatten`.
    """

    has_objects = packed = False
    given: Mapping[int, int] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Its number."""
        number = self.numbers[id(tensor)] = len(self)
        self.append(tensor)
        return number


def flatten(batch: Any, reads: BatchReads | None = None, packed: bool = False) -> FlatBatch:
    """Takes a batch apart.

    Args:
        batch: as the data yields it.
        reads: what the step can read of it. The rest is left as it is, is no part of the signature
            and may be of any kind.
        packed: whether it is packed for a device, so that it does not matter how it is aligned.

    Raises:
        UnknownLeafError: the batch holds something other than tensors, plain values, sequences,
            mappings and data classes.
    """
    tensors = _Tensors()
    tensors.packed = packed
    signature, rebuild = _flatten_read(batch, tensors, reads)
    layouts = None
    if type(batch) in (list, tuple) and len(tensors) == len(batch):
        own = all(map(operator.is_, tensors, batch))
        if own and all(type(one) is torch.Tensor and _C.has_plain_bits(one) for one in tensors):
            layouts, rebuild = _C.Layouts(batch), type(batch)  # which keep nothing of this one
    return FlatBatch(list(tensors), signature, rebuild, reads, layouts, tensors.has_objects)


def _flatten_read(
    batch: Any, tensors: _Tensors, reads: BatchReads | None
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


def _flatten(value: Any, tensors: _Tensors) -> tuple[Hashable, Rebuild]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _flatten_tensor(value, tensors)
    if id(kind) in _PLAIN_IDS:
        return (kind, _identity(value)), lambda _: value
    if kind is dict:
        return _flatten_mapping(value, tensors)
    if kind is list or kind is tuple:
        return _flatten_sequence(value, tensors)
    if isinstance(value, Enum):
        return _flatten_member(value, tensors)
    if isinstance(value, _TOLD_KINDS):
        return _flatten_number_or_text(value, tensors)
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_data or isinstance(value, (Mapping, list, tuple)):
        return _flatten_object(value, tensors)
    raise _unknown(value)


def _unknown(value: Any, what: str = "") -> UnknownLeafError:
    return UnknownLeafError(f"{type(value).__module__}.{type(value).__qualname__}{what}")


def _identity(value: Any) -> Hashable:
    """Numbers with a point by their bits: 0.0 is not -0.0, and no NaN another."""
    return _TOLD[type(value)](value) if type(value) in (float, complex) else value  # type: ignore[no-any-return]


def _flatten_tensor(value: torch.Tensor, tensors: _Tensors) -> tuple[Hashable, Rebuild]:
    if tensors.given is not None:
        if id(value) not in tensors.given:
            raise _unknown(value)
        return (tensors.given[id(value)], *_attached(value)), lambda _: value
    known = tensors.numbers.get(id(value))
    if known is not None:  # as code may see (`image is target`)
        return ("again", known), lambda replaced: replaced[known]
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    if value.is_conj() or value.is_neg():
        raise UnknownLeafError(f"{type(value).__qualname__} that is a lazily conjugated view")
    if value.requires_grad:
        raise UnknownLeafError(f"{type(value).__qualname__} that asks for a gradient")
    if not plain or value.layout != torch.strided:
        raise UnknownLeafError(f"{type(value).__qualname__} with layout {value.layout}")
    if value.is_inference():
        raise _unknown(value, " that was made in inference mode")
    if type(value) is not FakeTensor and (value.grad is not None or vars(value)):
        raise _unknown(value, " with attributes of its own")
    index = tensors.add(value)
    layout = value.dtype, tuple(value.shape), value.stride(), value.requires_grad
    signature: tuple[Hashable, ...] = (*layout, isinstance(value, torch.nn.Parameter))
    if not tensors.packed and is_skewed(value):  # its copy takes more memory
        signature += ("skewed",)
    return signature, lambda replaced: replaced[index]


def is_skewed(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins elsewhere than torch begins memory of its own: a view, say, or an
    array of numpy's. Kernels may sum in another order there."""
    return type(tensor) is not FakeTensor and bool(_C.is_skewed(tensor))


def _attached(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What code may have put to a tensor beside its values."""
    with torch._C.DisableTorchFunction():
        grad = tensor.grad if tensor.is_leaf else None
        hooks: tuple[Any, ...] = (
            tensor._backward_hooks,
            getattr(tensor, "_post_accumulate_grad_hooks", None),
        )
        return (
            tensor.requires_grad,
            None if grad is None else IdentityKey(grad),
            tuple(frozenset(map(IdentityKey, (one or {}).values())) for one in hooks),
            tuple((name, IdentityKey(held)) for name, held in vars(tensor).items()),
        )


def _left(value: Any) -> tuple[Hashable, Rebuild]:
    return ("unread",), lambda _: value


def _flatten_mapping(
    value: dict[Any, Any], tensors: _Tensors, unread: Collection[Any] = ()
) -> tuple[Hashable, Rebuild]:
    keys = tuple(_key(key, tensors) for key in value)
    parts = {
        key: _left(item) if key in unread else _flatten(item, tensors)
        for key, item in value.items()
    }
    signature = (dict, keys, tuple(part[0] for part in parts.values()))
    return signature, lambda replaced: {key: part[1](replaced) for key, part in parts.items()}


def _key(value: Any, tensors: _Tensors) -> Hashable:
    """A key of a mapping; users' may say of others that they are equal."""
    return value if type(value) is str else _without_tensors(value, tensors)


def _without_tensors(value: Any, tensors: _Tensors) -> Hashable:
    """The signature of what is not made again around other tensors, so that it may hold none."""
    before = len(tensors)
    signature, _ = _flatten(value, tensors)
    if len(tensors) > before:
        raise _unknown(value, " with a tensor in it")
    return signature


def _flatten_sequence(
    value: Sequence[Any], tensors: _Tensors, unread: Collection[int] = ()
) -> tuple[Hashable, Rebuild]:
    kind = type(value)
    parts = [
        _left(item) if position in unread else _flatten(item, tensors)
        for position, item in enumerate(value)
    ]
    signature = (kind, tuple(part[0] for part in parts))
    return signature, lambda replaced: kind(part[1](replaced) for part in parts)  # type: ignore[call-arg]


# Objects, of which all counts that their class could read: what they contain, attributes, slots,
# and what the class itself holds. None of their code is run.


def _flatten_member(value: Enum, tensors: _Tensors) -> tuple[Hashable, Rebuild]:
    """Of an enumeration, of which there is one each."""
    tensors.has_objects = True
    own = {name: part for name, part in vars(value).items() if name not in _OF_MEMBERS}
    return (IdentityKey(value), _without_tensors(own, tensors)), lambda _: value


def _flatten_number_or_text(value: Any, tensors: _Tensors) -> tuple[Hashable, Rebuild]:
    """Of a class derived from one of Python's."""
    kind: Any = type(value)
    told = next(tell for base, tell in _TOLD.items() if isinstance(value, base))(value)
    if isinstance(value, np.generic):
        return (kind, told), lambda _: value
    if base_of(kind) is not object:
        raise _unknown(value)
    tensors.has_objects = True
    own = _without_tensors(dict(own_attributes(value)), tensors)
    return (_class_of(kind), told, own), lambda _: value


def _flatten_object(value: Any, tensors: _Tensors) -> tuple[Hashable, Rebuild]:
    """A container of a class of its own, or a data class."""
    kind: Any = type(value)
    base = base_of(kind)
    if base is None or base not in (object, dict, defaultdict, list, tuple):
        raise _unknown(value)
    tensors.has_objects = True
    attributes = _flatten_mapping(dict(own_attributes(value)), tensors)
    slots = dict(slots_of(kind))
    factory = value.default_factory if base is defaultdict else None
    if base in (dict, defaultdict):
        items = OrderedDict.items(value) if issubclass(kind, OrderedDict) else dict.items(value)
        content = _flatten_mapping(dict(items), tensors)
    elif base in (list, tuple):
        content = _flatten_sequence(tuple(base.__iter__(value)), tensors)
    else:
        content = (None, lambda _: None)

    def rebuild(replaced: Sequence[torch.Tensor]) -> Any:
        held, own = content[1](replaced), attributes[1](replaced)
        twin = tuple.__new__(kind, held) if base is tuple else base.__new__(kind)
        if base is list:
            list.extend(twin, held)
        elif base is defaultdict:
            defaultdict.__init__(twin, factory, held)
        elif base is dict:
            put = OrderedDict if issubclass(kind, OrderedDict) else dict
            for key, item in held.items():
                put.__setitem__(twin, key, item)
        for name, part in own.items():
            if name in slots:
                slots[name].__set__(twin, part)
            else:
                object.__getattribute__(twin, "__dict__")[name] = part
        return twin

    return (_class_of(kind), IdentityKey(factory), content[0], attributes[0]), rebuild


def _class_of(kind: Any) -> Hashable:
    """A class, and what it holds for all its objects, but for methods."""
    held = [
        (name, (type(part), _identity(part)) if id(type(part)) in _PLAIN_IDS else IdentityKey(part))
        for each in kind.__mro__
        if not is_trusted_class(each)
        for name, part in vars(each).items()
        if name not in CLASS_NOISE and type(part) is not FunctionType
    ]
    return IdentityKey(kind), tuple(held)
