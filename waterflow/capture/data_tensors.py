"""The tensors that a job's data hand out as batches, or make batches from."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from waterflow.account.account import Account
from waterflow.account.class_parts import MEMORIES, is_a
from waterflow.account.trust import (
    Packages,
    is_package_class,
    is_package_file,
    is_trusted_class,
    is_trusted_code,
)
from waterflow.account.walk import Limits
from waterflow.capture.python_kind import code_of
from waterflow.common.spans import Spans
from waterflow.executor.data.batches import tensors_behind
from waterflow.executor.device.storages import storage_key
from waterflow.job.epochs import NumberedEpochs

#: Data that reach more are not looked into any further.
LIMITS = Limits(objects=20_000)


def makes_batches_anew(data: Any) -> bool:
    """Whether it is torch's loader that puts samples together: no batch is changed later."""
    return (
        type(data) is DataLoader
        and data.batch_sampler is not None
        and data.collate_fn is default_collate
    )


def hands_out_anew(data: Any) -> bool:
    """Whether nobody meets the containers of a batch again, whatever its step has done to them: its
    loader puts samples together by a library's function, or the same batches are made anew."""
    if isinstance(data, NumberedEpochs):
        return True
    kind = type(data)
    if not issubclass(kind, DataLoader) or data.batch_sampler is None:
        return False
    if not (is_trusted_class(kind) or is_package_class(kind)):  # its own way through the data
        return False
    collate: Any = data.collate_fn
    while isinstance(collate, functools.partial):
        collate = collate.func
    code = code_of(collate)
    if code is not None:
        return is_trusted_code(code) or is_package_file(code.co_filename)
    return is_trusted_class(type(collate)) or is_package_class(type(collate))


def tensors_of_batches(batches: Iterable[Any]) -> list[torch.Tensor] | None:
    """The tensors of batches that hold plain tensors and values alone; None for any others."""
    found: list[torch.Tensor] = []
    for batch in batches:
        parts = batch.values() if type(batch) is dict else batch
        for part in parts if type(batch) in (list, tuple, dict) else (batch,):
            if type(part) is torch.Tensor and part.layout is torch.strided:
                found.append(part)
            elif part is not None and type(part) not in (int, float, bool, str):
                return None
    return found


def identities_of_batches(batches: Iterable[Any]) -> set[int] | None:
    """Of all that can change in a list or tuple of batches, as `Account.has_any` takes it; None
    where these hold other things than plain tensors and values."""
    tensors = tensors_of_batches(batches)
    if tensors is None:
        return None
    found = {id(batches), *(id(batch) for batch in batches if type(batch) in (list, dict))}
    found.update(map(id, tensors))
    found.update(map(storage_key, tensors))
    return found


def memories_of(values: Iterable[Any]) -> Spans:
    """The addresses of the memory of tensors, arrays and buffers among objects. By that one
    tells what is shared with arrays, of which torch knows no storage, and with tensors made of
    them, each of which has a storage of its own over the same memory."""
    return Spans(map(_memory_of, values))


def _memory_of(value: Any) -> tuple[int, int]:
    if is_a(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return 0, 0
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if is_a(value, MEMORIES):
        try:
            value = np.asarray(memoryview(value))
        except ValueError:  # it was released, and has none
            return 0, 0
    if not is_a(value, np.ndarray) or value.size == 0:
        return 0, 0
    begin = end = value.__array_interface__["data"][0]
    for size, stride in zip(value.shape, value.strides, strict=True):
        begin, end = begin + min(0, (size - 1) * stride), end + max(0, (size - 1) * stride)
    return begin, end + value.itemsize


def tensors_in(data: Any) -> list[torch.Tensor] | None:
    """All tensors on the host or a device that data are known to hold, arrays of numpy's as tensors
    over the same memory; None where data reach too much to tell."""
    if type(data) in (list, tuple):
        plain = tensors_of_batches(data)
        if plain is not None:
            return plain
    behind = tensors_behind(data)
    if behind is not None:
        return [*behind]
    reached = Account.take({"data": data}, packages=Packages.BUT_REPORTERS, limits=LIMITS)
    if not reached.is_whole:
        return None
    tensors = [t for t in reached.instances(torch.Tensor) if t.layout is torch.strided]
    return tensors + [t for a in reached.instances(np.ndarray) for t in _over(a)]


def _over(array: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    """The array's memory as a tensor of bytes; nothing where it is in pieces or not numbers'."""
    if array.dtype.hasobject or not (array.flags.c_contiguous and array.flags.writeable):
        return []
    return [torch.from_numpy(array.reshape(-1).view(np.uint8))] if array.size else []
