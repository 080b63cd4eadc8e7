"""Traced tensors that stand in for a model's own, wherever its modules keep them.

``torch.nn.utils.stateless`` swaps what is registered; modules also keep parameters in plain
attributes (the weight lists of ``nn.LSTM``, a list of tied weights), and a trace that met the real
tensor there would lose its gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Attributes of every module that never hold tensors of their own.
_REGISTRIES = {"_parameters", "_buffers", "_modules"}

_ABSENT = object()

#: The dictionary of a module, a key in it, what was there, and what stands in for it.
_Place = tuple[dict[str, Any], str, Any, Any]


class UnkeptChangeError(RuntimeError):
    """The traced code gave a module another parameter or buffer; the graph would not."""


@contextlib.contextmanager
def standing_in(model: nn.Module, twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, every module of the model has ``twins[id(tensor)]`` where it had the tensor.

    Buffers may be given new tensors inside; whoever wants those takes them before the end.

    Ensures:
        the modules are as they were, but for plain attributes that the code inside has changed.

    Raises:
        UnkeptChangeError: a parameter was replaced, or a parameter or buffer came or went.
    """
    registered, plain = _places(model, twins)
    keys = {name: _registered_names(module) for name, module in model.named_modules()}
    for holder, key, _, twin in (*registered, *plain):
        holder[key] = twin
    try:
        yield
        _check_registered(model, keys, registered)
    finally:
        _restore_registered(model, keys, registered)
        for holder, key, value, twin in plain:
            if _alike(holder.get(key, _ABSENT), twin):
                holder[key] = value


def _places(
    model: nn.Module, twins: Mapping[int, torch.Tensor]
) -> tuple[list[_Place], list[_Place]]:
    registered: list[_Place] = []
    plain: list[_Place] = []
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                registered.append((store, key, tensor, twins.get(id(tensor), tensor)))
        for key, value in vars(module).items():
            if key not in _REGISTRIES and (twin := _replaced(value, twins)) is not value:
                plain.append((vars(module), key, value, twin))
    return registered, plain


def _replaced(value: Any, twins: Mapping[int, torch.Tensor]) -> Any:
    """The same value around the twins; the value itself where there is nothing to replace."""
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if isinstance(value, weakref.ref):
        tensor = value()
        return weakref.ref(twins[id(tensor)]) if id(tensor) in twins else value
    if type(value) in (list, tuple):
        items = [_replaced(item, twins) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    if type(value) is dict:
        pairs = {key: _replaced(item, twins) for key, item in value.items()}
        return pairs if any(pairs[key] is not value[key] for key in value) else value
    return value


def _alike(left: Any, right: Any) -> bool:
    """Whether two values hold the same objects."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    if type(left) is dict:
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    return isinstance(left, (int, float, str)) and left == right


def _registered_names(module: nn.Module) -> tuple[list[str], list[str]]:
    return list(module._parameters), list(module._buffers)


def _check_registered(
    model: nn.Module, keys: Mapping[str, tuple[list[str], list[str]]], places: list[_Place]
) -> None:
    for name, module in model.named_modules():
        if _registered_names(module) != keys.get(name):
            owner = f"module {name!r}" if name else "the model"
            raise UnkeptChangeError(
                f"{owner} gains or loses parameters or buffers during a step (make them before "
                "the run; a forward pass of the model is often enough)"
            )
    for holder, key, value, twin in places:
        if isinstance(value, nn.Parameter) and holder[key] is not twin:
            raise UnkeptChangeError(f"the model replaces its parameter {key!r} during a step")


def _restore_registered(
    model: nn.Module, keys: Mapping[str, tuple[list[str], list[str]]], places: list[_Place]
) -> None:
    for name, module in model.named_modules():
        wanted = keys.get(name, ([], []))
        for store, names in zip((module._parameters, module._buffers), wanted, strict=True):
            for key in store.keys() - set(names):
                del store[key]
    for holder, key, value, _ in places:
        holder[key] = value
