"""Shadows: copies of a model's modules, and of an optimizer, for a trace to run on.

A trace needs traced tensors where the model has real ones. The user's own modules are never touched
for that: other threads may look at them. A shadow module has its module's class and attributes, and
in place of the module's tensors and submodules their twins and shadows, wherever modules keep them
(``nn.LSTM`` has its weights in lists, too). What the traced code assigns to a shadow's attributes
is gone with it. Code that reaches a real module by another way (a closure) finds real tensors
there, which the trace maps to their twins (`waterflow.capture.tracing`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from waterflow.account.places import REGISTRIES


class UnkeptChangeError(RuntimeError):
    """The traced code gave a module another parameter or buffer; the graph would not."""


class Shadow:
    """A shadow of a model: `model`, to be traced, and what the traced code did to it."""

    def __init__(self, model: nn.Module, twins: Mapping[int, torch.Tensor]) -> None:
        """Makes the shadow.

        Args:
            model: the user's model; only read.
            twins: what stands in for a tensor of it, by the tensor's identity.
        """
        self._twins: dict[int, Any] = dict(twins)
        originals = list(model.modules())
        for module in originals:
            self._twins[id(module)] = type(module).__new__(type(module))
        for module in originals:
            vars(self._twins[id(module)]).update(self._attributes(module))
        self.model: nn.Module = self._twins[id(model)]
        self._given = [_Given(name, module) for name, module in self.model.named_modules()]

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        found = {}
        for key, value in vars(module).items():
            if key in REGISTRIES:
                found[key] = type(value)((name, self.twin(item)) for name, item in value.items())
            elif isinstance(value, dict) and key.endswith("_hooks"):
                found[key] = type(value)(
                    (number, self.twin(hook)) for number, hook in value.items()
                )
            else:
                found[key] = self.twin(value)
        return found

    def twin(self, value: Any) -> Any:
        """The same value around the twins; the value itself where there is nothing to replace."""
        if id(value) in self._twins:
            return self._twins[id(value)]
        if isinstance(value, weakref.ref):
            return weakref.ref(self._twins[id(value())]) if id(value()) in self._twins else value
        if isinstance(value, MethodType) and id(value.__self__) in self._twins:
            return MethodType(value.__func__, self._twins[id(value.__self__)])
        if type(value) in (list, tuple):
            return _rebuilt(value, [self.twin(item) for item in value], type(value))
        if type(value) is dict:
            items = {key: self.twin(item) for key, item in value.items()}
            changed = any(items[key] is not value[key] for key in value)
            return items if changed else value
        if type(value) is functools.partial:
            return self._partial(value)
        return value

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        """The same for a partial function, which may have attributes, too."""
        parts = (value.func, value.args, value.keywords, vars(value))
        twins = tuple(map(self.twin, parts))
        if all(map(operator.is_, parts, twins)):
            return value
        function, arguments, keywords, attributes = twins
        made = functools.partial(function, *arguments, **keywords)
        vars(made).update(attributes)
        return made

    def check(self) -> None:
        """Whether the modules are as they were made, but for what a graph can follow.

        Buffers may have been given new tensors; whoever wants those looks at `model`. Containers
        that the modules share with the user's are not looked at.

        Raises:
            UnkeptChangeError: a parameter was replaced, a parameter, buffer or module came or went,
                or a plain attribute has another value; says which.
        """
        now = dict(self.model.named_modules())
        for given in self._given:
            module = now.pop(given.name, None)
            problem = "a module comes or goes" if module is None else given.problem(module)
            if problem:
                raise UnkeptChangeError(problem)
        if now:
            raise UnkeptChangeError(f"the model gains the module {next(iter(now))!r} in a step")


class _Given:
    """What one shadow module had before the trace."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.attributes = {
            key: (value, _contents(value))
            for key, value in vars(module).items()
            if key not in REGISTRIES
        }

    def problem(self, module: nn.Module) -> str | None:
        """What a graph of the step would not do to this module; None if there is nothing."""
        owner = f"module {self.name!r}" if self.name else "the model"
        for before, now in ((self.parameters, module._parameters), (self.buffers, module._buffers)):
            if before.keys() != now.keys():
                return (
                    f"{owner} gains or loses parameters or buffers during a step (make them before "
                    "the run; a forward pass of the model is often enough)"
                )
        for key, value in self.parameters.items():
            if module._parameters[key] is not value:
                return f"the model replaces its parameter {key!r} during a step"
        attribute = self._changed(vars(module))
        if attribute is None:
            return None
        place = f"{self.name}.{attribute}" if self.name else attribute
        return (
            f"the step changes the model's attribute {place!r}, and a captured step would not (a "
            "tensor that must persist belongs in a buffer of the model)"
        )

    def _changed(self, now: Mapping[str, Any]) -> str | None:
        for key in self.attributes.keys() | (now.keys() - set(REGISTRIES)):
            value, contents = self.attributes.get(key, (_ABSENT, None))
            after = now.get(key, _ABSENT)
            if not _same(value, after) or (contents is not None and _contents(after) != contents):
                return key
        return None


_ABSENT = object()
#: What an optimizer's step may change: swapped for the trace, or without effect on its numbers.
_OPTIMIZER_OWN = {
    "param_groups",
    "state",
    "step",
    "_opt_called",
    "_need_device_dtype_check_for_fused",
}


def _same(before: Any, after: Any) -> bool:
    plain = type(before) is type(after) and isinstance(before, (int, float, str, bytes))
    return before is after or (plain and bool(before == after or before != before))


def _contents(value: Any) -> list[int] | None:
    """The identities of what a container holds; None for anything else."""
    if type(value) in (list, tuple):
        return [id(item) for item in value]
    if type(value) is dict:
        return [id(item) for pair in value.items() for item in pair]
    return None


def _rebuilt(value: Any, items: list[Any], kind: Callable[[list[Any]], Any]) -> Any:
    changed = any(new is not old for new, old in zip(items, value, strict=True))
    return kind(items) if changed else value


def shadow_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any
) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes with other parameter groups and state.

    A learning-rate scheduler wraps ``step`` in a function that knows the user's optimizer; the
    shadow has the class's own.
    """
    shadow = type(optimizer).__new__(type(optimizer))
    attributes = dict(vars(optimizer))
    if getattr(attributes.get("step"), "_wrapped_by_lr_sched", False):
        del attributes["step"]
    attributes.update(param_groups=groups, state=state)
    vars(shadow).update(attributes)
    return shadow


def changed_attribute(
    shadow: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
) -> str | None:
    """A plain attribute that the shadow's step has changed; None if there is none."""
    now, before = vars(shadow), vars(optimizer)
    for key in (now.keys() | before.keys()) - _OPTIMIZER_OWN:
        if not _same(before.get(key, _ABSENT), now.get(key, _ABSENT)):
            return key
    return None
