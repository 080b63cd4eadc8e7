"""What an optimizer holds, as a trace sees it: layouts of its state, and its hyperparameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from waterflow.allocator_ext import _C
from waterflow.job.several import optimizers_in

#: Where a hyperparameter lives: (group, key) or (group, key, position in its tuple).
HyperKey = tuple[Any, ...]

#: Optimizer state of each trained parameter: layouts of its tensors, plain values as they are.
StateLayout = list[dict[Any, Any]]


class NotCapturableError(Exception):
    """The optimizer's step cannot be captured exactly. Says why.

    Never a user's: whoever captures a step leaves the optimizer out, to run eagerly.
    """


@dataclass(frozen=True)
class Layout:
    """Shape, strides, type and device of a tensor: all that a trace needs of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor, real or fake."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        """A new tensor of this layout (fake, inside a fake mode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def numbers_of(value: Any) -> bool:
    """Whether a hyperparameter is a tuple of numbers that live apart (``betas``)."""
    return isinstance(value, (tuple, list)) and all(type(v) is float for v in value)


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[HyperKey, Any]:
    """All hyperparameters of all groups; tuples of numbers taken apart."""
    found: dict[HyperKey, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                continue
            if numbers_of(value):
                found.update({(index, key, place): v for place, v in enumerate(value)})
            else:
                found[index, key] = value
    return found


def watch_hyperparameters(
    optimizer: torch.optim.Optimizer, but: Collection[str] = frozenset()
) -> Any:
    """Guards that all hyperparameters are what they are now, `but` some, and the optimizer's state
    its own; None where some of them can change unseen."""
    guards = _C.Guards()
    is_watched = all(_watch(member, guards, but) for member in optimizers_in(optimizer))
    return guards if is_watched else None


def _watch(optimizer: torch.optim.Optimizer, guards: Any, but: Collection[str]) -> bool:
    """Adds what is to be looked at of one optimizer; returns whether nothing can change unseen."""
    own, groups = vars(optimizer), optimizer.param_groups
    if not (own.keys() >= {"param_groups", "state"} and type(groups) is list):
        return False
    guards.attributes(optimizer, frozenset({"param_groups", "state"}), None)
    guards.items(groups, list)
    for group in groups:
        if type(group) is not dict:
            return False
        guards.mapping(group, frozenset({"params", *but}))
        for key, value in group.items():
            if type(value) is list and key != "params":
                guards.items(value, list)
            elif key != "params" and not _is_plain(value):
                return False
    return True


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, torch.Tensor)


def moved_numbers(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The hyperparameters of a group that have other values than in a copy made before."""
    keys = before.keys() | now.keys()
    return [key for key in keys if not same_value(before.get(key), now.get(key))]


def live_places(
    optimizer: torch.optim.Optimizer, read: Collection[str] | None = frozenset()
) -> dict[int, set[str]]:
    """What captures follow by themselves: keys, by the identity of the object or dictionary.

    The state's tensors are bound to a captured step; the rest are notes that `step` leaves, without
    an effect on its numbers, unless they are among the names that code of the user's `read`s
    (None: any).
    """
    notes = {"_opt_called", "_step_count", "_need_device_dtype_check_for_fused"}
    own = {"state"} if read is None else {"state"} | (notes - set(read))
    members = optimizers_in(optimizer)
    return {each: own for member in members for each in (id(member), id(vars(member)))}


def hyperparameter_places(optimizer: torch.optim.Optimizer) -> dict[int, set[str]]:
    """What captures follow by themselves as long as nobody but the optimizer reads it: its
    hyperparameters, which are inputs of a captured step, or checked for each. Not those that can be
    changed where they are, such as dictionaries."""
    groups = optimizer.param_groups
    return {
        id(group): {key for key, value in group.items() if key != "params" and _is_followed(value)}
        for group in groups
    }


def _is_followed(value: Any) -> bool:
    return numbers_of(value) or _is_fixed(value)


def _is_fixed(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) is not list and _is_plain(value)


class StateEntries:
    """The entries that an optimizer's state had, to see quickly whether it has them still."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._states = [member.state for member in optimizers_in(optimizer)]
        self._guards = _C.Guards()
        for state in self._states:
            self._guard(state)

    def _guard(self, state: Any) -> None:
        self._guards.mapping(state, None)
        for entries in state.values():
            if isinstance(entries, dict):
                others = {k for k, value in entries.items() if not isinstance(value, torch.Tensor)}
                self._guards.mapping(entries, others or None)

    @property
    def guards(self) -> Any:
        """The extension's form of the entries; that they are the optimizer's is not part of it."""
        return self._guards

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no tensor of the state has come, gone or been replaced, since."""
        for member, state in zip(optimizers_in(optimizer), self._states, strict=False):
            if member.state is not state:
                return False
        return bool(self._guards.holds())


def plain_entries(optimizer: torch.optim.Optimizer) -> set[tuple[int, Any]]:
    """Where the optimizer's state has something else than tensors."""
    return {
        (id(parameter), key)
        for member in optimizers_in(optimizer)
        for parameter, entries in member.state.items()
        if isinstance(entries, dict)
        for key, value in entries.items()
        if not isinstance(value, torch.Tensor)
    }


def state_layout(optimizer: torch.optim.Optimizer) -> StateLayout:
    """Layouts of the optimizer's present state."""
    state = optimizer.state
    return [
        {key: layout_or_value(value) for key, value in state[p].items()} if p in state else {}
        for p in trained_parameters(optimizer)
    ]


def layout_or_value(value: Any) -> Any:
    """A tensor's layout; any other value itself."""
    return Layout.of(value) if isinstance(value, torch.Tensor) else value


def same_value(left: Any, right: Any) -> bool:
    """Whether two plain values are the same, zeros with their sign; tensors are only if they are
    the same object, as who has one may write to it later."""
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, torch.Tensor):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float):
        return left == right and math.copysign(1.0, left) == math.copysign(1.0, right)
    return bool(left == right)


def same_hyperparameters(
    before: Mapping[HyperKey, Any] | None, now: Mapping[HyperKey, Any]
) -> bool:
    """Whether hyperparameters are the same (`same_value`); where nobody has touched them, they are
    the very same objects. Equality is not enough: 1 is True, and an equal tensor is another one."""
    if before is None or before.keys() != now.keys():
        return False
    if tuple(before) == tuple(now) and all(map(operator.is_, before.values(), now.values())):
        return True
    return all(same_value(before[key], value) for key, value in now.items())
