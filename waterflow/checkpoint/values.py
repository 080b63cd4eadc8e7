"""Python's values as JSON and tensors, and back, each of the type that it was.

What JSON has itself stays as it is; all else is an object with a tag, ``{"$": "tuple", ...}``.
Nothing is ever run or imported to read a value, so a file of somebody else's can do no harm.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Json = Any
_TAG = "$"
_ALIGNMENT = 64  # bytes
_NUMBERS = "biuf"  # kinds of numpy's types


#: What a file of tensors has names for, in every version of safetensors since 0.4.
_KEPT_AS_THEY_ARE = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    )
)


class NotExpressibleError(Exception):
    """A value that JSON and tensors cannot hold; says where it is and of what type.

    Never a user's: whoever takes a snapshot names the job and the remedy.
    """


class DamagedValueError(Exception):
    """What was read is no value of this format."""


class Packer:
    """Turns values into JSON, and takes note of the tensors that they hold."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors as they are now, on the host and contiguous, by the names under
        which the JSON refers to them."""
        return copied_together(self._tensors)

    def tensor(self, tensor: torch.Tensor, where: str) -> Json:
        """Takes note of a tensor; returns what stands for it.

        Raises:
            NotExpressibleError: it has no plain memory of its own.
        """
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise NotExpressibleError(f"{where} is a tensor of layout {tensor.layout}")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise NotExpressibleError(f"{where} is a {_name_of(tensor)}")
        if tensor.device.type == "meta":
            raise NotExpressibleError(f"{where} has no values: it is on the device meta")
        key = where
        while key in self._tensors:
            key += "'"
        plain = tensor.detach().resolve_conj().resolve_neg()
        packed: dict[str, Json] = {_TAG: "tensor", "name": key}
        if plain.device.type != "cpu":
            packed["on_device"] = True
        overlaps = 0 in plain.stride()  # expanded; nothing could be written into such a layout
        if plain.stride() != _plain_stride(plain.shape) and not overlaps:
            packed["stride"] = list(plain.stride())
        if plain.dtype not in _KEPT_AS_THEY_ARE:
            packed |= {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
            plain = plain.reshape(-1).view(torch.uint8)
        self._tensors[key] = plain
        return packed

    def pack(self, value: Any, where: str) -> Json:
        """A value as JSON.

        Args:
            value: any.
            where: what it is called in errors, and its tensors in the file.

        Raises:
            NotExpressibleError: it holds something that JSON and tensors cannot.
        """
        try:
            return self._pack(value, where)
        except RecursionError:
            raise NotExpressibleError(f"{where} holds itself, or is nested too deeply") from None

    def _pack(self, value: Any, where: str) -> Json:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, where)
        if kind is list:
            return self._items(value, where)
        if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
            return {key: self._pack(item, f"{where}.{key}") for key, item in value.items()}
        pack = _PACKERS.get(kind)
        if pack is not None:
            return pack(self, value, where)
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return self._array(np.asarray(value), where) | {_TAG: "number"}
        raise NotExpressibleError(f"{where} is a {_name_of(value)}")

    def _items(self, values: Any, where: str) -> list[Json]:
        return [self._pack(item, f"{where}.{place}") for place, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[Json]:
        return [
            [self._pack(key, f"{where}'s key {key!r}"), self._pack(item, f"{where}.{key}")]
            for key, item in value.items()
        ]

    def _array(self, value: np.ndarray[Any, Any], where: str) -> dict[str, Json]:
        if value.dtype.kind not in _NUMBERS:
            raise NotExpressibleError(f"{where} is an array of {value.dtype}")
        whole = np.ascontiguousarray(value).reshape(-1)
        data = torch.from_numpy(whole.view(np.uint8).copy())
        named = self.tensor(data, where)["name"]
        shape = list(value.shape)
        return {_TAG: "array", "name": named, "dtype": value.dtype.str, "shape": shape}


def _plain_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def copied_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors on the host, contiguous, in one piece of memory.

    In large pages, where there are some: to touch ResNet-50's state for the first time in pages of
    4 KiB takes five times as long as to copy it, and in many pieces sixty times (`mmap` of 200 MiB,
    2 virtual cores, 22 November 2026).
    """
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    copies = {}
    for name, tensor in tensors.items():
        part = whole[places[name] : places[name] + tensor.nbytes]
        copies[name] = part.view(tensor.dtype).view(tensor.shape)
        copy_values(copies[name], tensor)
    return copies


def copy_values(to: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a tensor's values into another one of its shape and type.

    On the host by one thread: the many that torch takes wait for each other at every tensor, where
    others train on the same cores.
    """
    plain = tensor.device.type == to.device.type == "cpu" and to.is_contiguous()
    if plain and tensor.is_contiguous() and tensor.numel():
        np.copyto(_bytes_of(to), _bytes_of(tensor))
    else:
        with torch.no_grad():
            to.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _name_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _of_items(tag: str) -> Callable[[Packer, Any, str], Json]:
    return lambda packer, value, where: {_TAG: tag, "items": packer._items(value, where)}


def _of_pairs(tag: str) -> Callable[[Packer, Any, str], Json]:
    return lambda packer, value, where: {_TAG: tag, "pairs": packer._pairs(value, where)}


#: How values of types that JSON does not have are packed; these very types, no subclasses.
_PACKERS: dict[type, Callable[[Packer, Any, str], Json]] = {
    tuple: _of_items("tuple"),
    set: _of_items("set"),
    frozenset: _of_items("frozenset"),
    torch.Size: _of_items("size"),
    dict: _of_pairs("dict"),
    OrderedDict: _of_pairs("ordered"),
    Counter: _of_pairs("counter"),
    deque: lambda p, v, where: {_TAG: "deque", "items": p._items(v, where), "most": v.maxlen},
    complex: lambda p, v, where: {_TAG: "complex", "items": p._items((v.real, v.imag), where)},
    bytes: lambda p, v, where: {_TAG: "bytes", "hex": v.hex()},
    torch.dtype: lambda p, v, where: {_TAG: "dtype", "is": str(v).removeprefix("torch.")},
    np.ndarray: Packer._array,
}


class Unpacker:
    """Turns what a `Packer` has made back into values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Args beyond the obvious.

        device: where tensors go that were not on the host.
        """
        self._tensors = tensors
        self._device = device

    def raw(self, name: str) -> torch.Tensor:
        """A tensor by its name, as it is kept."""
        if name not in self._tensors:
            raise DamagedValueError(f"the tensor {name!r} is missing")
        return self._tensors[name]

    def view(self, packed: Json) -> torch.Tensor:
        """A tensor's values, on the host and contiguous; to read only."""
        kept = self.raw(packed["name"])
        if "dtype" in packed:
            kept = kept.view(_dtype(packed["dtype"])).reshape(packed["shape"])
        return kept

    def tensor(self, packed: Json) -> torch.Tensor:
        """A new tensor, of the layout that was packed."""
        kept = self.view(packed)
        device = self._device if packed.get("on_device") else torch.device("cpu")
        stride = packed.get("stride")
        if stride is None:
            made = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        else:
            made = torch.empty_strided(kept.shape, stride, dtype=kept.dtype, device=device)
        copy_values(made, kept)
        return made

    def unpack(self, packed: Json) -> Any:
        """A value.

        Raises:
            DamagedValueError: it is none of this format.
        """
        if isinstance(packed, list):
            return [self.unpack(item) for item in packed]
        if not isinstance(packed, dict):
            return packed
        if _TAG not in packed:
            return {key: self.unpack(item) for key, item in packed.items()}
        unpack = _UNPACKERS.get(packed[_TAG])
        if unpack is None:
            raise DamagedValueError(f"there is no kind of value {packed[_TAG]!r}")
        return unpack(self, packed)

    def _items(self, packed: Json) -> list[Any]:
        return [self.unpack(item) for item in packed["items"]]

    def _pairs(self, packed: Json) -> list[tuple[Any, Any]]:
        return [(self.unpack(key), self.unpack(item)) for key, item in packed["pairs"]]

    def _array(self, packed: Json) -> np.ndarray[Any, Any]:
        data, dtype = self.raw(packed["name"]).numpy().copy(), np.dtype(packed["dtype"])
        if dtype.kind not in _NUMBERS:
            raise DamagedValueError(f"an array of {dtype} is none of numbers")
        return data.view(dtype).reshape(packed["shape"])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamagedValueError(f"torch has no type {name!r}")
    return found


_UNPACKERS: dict[str, Callable[[Unpacker, Json], Any]] = {
    "float": lambda u, packed: float(packed["is"]),
    "tensor": Unpacker.tensor,
    "tuple": lambda u, packed: tuple(u._items(packed)),
    "set": lambda u, packed: set(u._items(packed)),
    "frozenset": lambda u, packed: frozenset(u._items(packed)),
    "size": lambda u, packed: torch.Size(u._items(packed)),
    "dict": lambda u, packed: dict(u._pairs(packed)),
    "ordered": lambda u, packed: OrderedDict(u._pairs(packed)),
    "counter": lambda u, packed: Counter(dict(u._pairs(packed))),
    "deque": lambda u, packed: deque(u._items(packed), packed["most"]),
    "complex": lambda u, packed: complex(*u._items(packed)),
    "bytes": lambda u, packed: bytes.fromhex(packed["hex"]),
    "dtype": lambda u, packed: _dtype(packed["is"]),
    "array": Unpacker._array,
    "number": lambda u, packed: u._array(packed)[()],
}
