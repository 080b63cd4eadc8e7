"""Jobs around single functions: a call whose tensors are parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import waterflow as wf

#: What each step's loss is multiplied by: no step may be taken for another.
_SCALES = (1.0, 0.5, 1.5)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor among a call's arguments."""

    name: str


class Call(nn.Module):
    """A function of tensors as a module: tensors that need a gradient become its parameters.

    Args:
        function: what is called; a module becomes a submodule.
        args, kwargs: its arguments; tensors in nested lists, tuples and dicts are found.
        after: applied to the result, as torch's tables want it for some operators.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.function = function
        self.after = after
        self.args = self._slotted(tuple(args))
        self.kwargs = self._slotted(dict(kwargs))

    def _slotted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"tensor{len(self._parameters) + len(self._buffers)}"
            if value.requires_grad:
                self.register_parameter(name, nn.Parameter(value.detach()))
            else:
                self.register_buffer(name, value)
            return _Slot(name)
        if type(value) in (list, tuple):
            return type(value)(self._slotted(part) for part in value)
        if type(value) is dict:
            return {key: self._slotted(part) for key, part in value.items()}
        return value

    def _filled(self, value: Any) -> Any:
        if isinstance(value, _Slot):
            return getattr(self, value.name)
        if type(value) in (list, tuple):
            return type(value)([self._filled(part) for part in value])
        if type(value) is dict:
            return {key: self._filled(part) for key, part in value.items()}
        return value

    def forward(self) -> Any:
        result = self.function(*self._filled(self.args), **self._filled(self.kwargs))
        return result if self.after is None else self.after(result)


def differentiable(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result that have a gradient."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from differentiable(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from differentiable(part)


def total(model: nn.Module, scale: torch.Tensor) -> torch.Tensor:
    """The loss of calls: the sum of the sines of all that they return.

    The sine makes gradients of many values and both signs: sums of ones would be exact in any
    order, and hide that the order is another.
    """
    losses = [_sines(tensor) for call in model.children() for tensor in differentiable(call())]
    return torch.stack(losses).sum() * scale


def _sines(tensor: torch.Tensor) -> torch.Tensor:
    real = tensor.abs() if tensor.is_complex() else tensor
    return real.to(torch.float32).sin().sum()


def job_of(calls: Sequence[Call]) -> wf.Job:
    """A job of three steps that trains all parameters of the calls.

    The little momentum keeps the gradients' last bits in the optimizer's state, which is compared;
    in the parameters they would be rounded away.
    """
    model = nn.ModuleList(calls).train()
    return wf.Job(
        "calls",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.01),
        loss=total,
        data=[torch.tensor(scale) for scale in _SCALES],
        seed=0,
    )


def trains(call: Call) -> bool:
    """Whether the eager loop can train the call at all."""
    try:
        total(nn.ModuleList([call]), torch.tensor(1.0)).backward()
    except Exception:
        return False
    return any(parameter.grad is not None for parameter in call.parameters())
