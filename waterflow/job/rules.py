"""How a job's steps are made beside its model, loss and optimizer: one value, checked here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

_AUTOCAST = (torch.bfloat16, torch.float16)


class StepRules(NamedTuple):
    """What a step does beside calling the loss and the optimizer: part of what it is.

    Attributes are those of `Job`.
    """

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    autocast: torch.dtype | None = None
    accumulate: int = 1

    def check(self, require: Callable[[object, str], None]) -> None:
        """Looks whether the values can be used.

        Args:
            require: is given a condition and what is wrong where it does not hold.
        """
        for name in ("clip_grad_norm", "clip_grad_value"):
            value = getattr(self, name)
            number = type(value) in (int, float)
            require(
                value is None or (number and value > 0),
                f"{name} must be above 0 or None, got {value!r}",
            )
        require(
            self.autocast is None or self.autocast in _AUTOCAST,
            f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}",
        )
        require(
            type(self.accumulate) is int and self.accumulate >= 1,
            f"accumulate must be a positive whole number, got {self.accumulate!r}",
        )

    def forward(self, device: Callable[[], torch.device]) -> AbstractContextManager[Any]:
        """The context of a forward pass and its loss. On which device that is takes a look at the
        model, and is asked for autocast alone."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device().type, dtype=self.autocast)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped at all."""
        return self.clip_grad_norm is not None or self.clip_grad_value is not None

    def scaled(self, loss: Any) -> Any:
        """The loss of one of a step's batches, as it is differentiated."""
        return loss if self.accumulate == 1 else loss / self.accumulate

    def clip(self, parameters: list[torch.Tensor]) -> None:
        """Clips gradients as torch does, by their norm and then by their values."""
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        if self.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_grad_value)
