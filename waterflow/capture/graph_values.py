"""The arguments of a trace's nodes and the tensors that they stand for, as plain data and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from waterflow.capture.fast_fakes import fake_of
from waterflow.capture.fast_layouts import strides_of

_META, _HOST = torch.device("meta"), torch.device("cpu")
_PLAIN = frozenset({type(None), bool, int, str})
_NAMED: tuple[Any, ...] = (torch.dtype, torch.layout, torch.memory_format)


class NotPlainError(Exception):
    """A trace has something that has no plain form. Never a user's."""


class ValueWriter:
    """Writes the values of one graph's nodes.

    A tensor is ``[storage, type, shape]``, with strides and offset where it is not contiguous from
    the start; a storage that is met first is followed by its bytes, where a view does not fill it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is used twice

    def value(self, value: Any) -> Any:
        """What a node stands for."""
        if isinstance(value, torch.Tensor):
            return {"t": self._tensor(value)}
        if type(value) in (list, tuple):
            return {"l" if type(value) is list else "u": [*map(self.value, value)]}
        if type(value) in _PLAIN or type(value) is float:
            return value
        raise NotPlainError(f"a node's value of {type(value)}")

    def argument(self, value: Any, places: Mapping[fx.Node, int]) -> Any:
        """What a node is given; other nodes by their places."""
        kind = type(value)
        if kind is fx.Node:
            return {"n": places[value]}
        if kind in _PLAIN:
            return value
        if isinstance(value, float):
            return float(value)
        if isinstance(value, (list, tuple)):
            return [self.argument(part, places) for part in value]
        if isinstance(value, _NAMED):
            return {"a": str(value).removeprefix("torch.")}
        if kind is torch.device and value == _HOST:
            return {"d": "cpu"}
        raise NotPlainError(f"an argument of {kind}")

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        plain = value.layout is torch.strided and value.device == _HOST
        if not plain or value.is_conj() or value.is_neg():
            raise NotPlainError("a tensor of another kind")
        storage = value.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        found: list[Any] = [number, dtype, shape]
        is_new = number == len(self._kept)
        offset, strides = value.storage_offset(), value.stride()
        is_whole = offset == 0 and strides == strides_of(tuple(shape))
        if is_new:
            self._kept.append(storage)
        size = storage.nbytes()
        if not is_whole or (is_new and size != value.nbytes):
            found += [list(strides), offset, *([size] if is_new else [])]
        return found


class ValueReader:
    """Makes the values of one graph's nodes again, as fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode, nodes: Sequence[fx.Node]) -> None:
        """Args beyond the obvious.

        nodes: by place; may grow.
        """
        self._mode = mode
        self._nodes = nodes
        self._storages: list[torch.UntypedStorage] = []

    def value(self, found: Any) -> Any:
        """What a node stands for."""
        if type(found) is not dict:
            return found
        ((kind, inner),) = found.items()
        if kind == "t":
            return self._tensor(*inner)
        parts = map(self.value, inner)
        return list(parts) if kind == "l" else tuple(parts)

    def argument(self, found: Any) -> Any:
        """What a node is given."""
        if type(found) is list:
            return [*map(self.argument, found)]
        if type(found) is not dict:
            return found
        ((kind, inner),) = found.items()
        if kind == "n":
            return self._nodes[inner]
        if kind == "d":
            return torch.device(inner)
        named = getattr(torch, inner)
        if kind != "a" or not isinstance(named, _NAMED):
            raise ValueError(f"an argument {found!r}")
        return named

    def _tensor(
        self,
        number: int,
        dtype_name: str,
        shape: list[int],
        strides: list[int] | None = None,
        offset: int = 0,
        size: int | None = None,
    ) -> FakeTensor:
        dtype = getattr(torch, dtype_name)
        if number == len(self._storages):
            if size is None and offset == 0:
                own = strides or strides_of(tuple(shape))
                tensor = torch.empty_strided(shape, own, dtype=dtype, device=_META)
                self._storages.append(tensor.untyped_storage())
                return fake_of(self._mode, tensor, _HOST)
            whole = torch.empty(size or 0, dtype=torch.uint8, device=_META)
            self._storages.append(whole.untyped_storage())
        storage, own = self._storages[number], strides or strides_of(tuple(shape))
        tensor = torch.empty(0, dtype=dtype, device=_META)
        tensor.set_(storage, offset, tuple(shape), tuple(own))  # type: ignore[call-overload]
        return fake_of(self._mode, tensor, _HOST)
