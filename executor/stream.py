"""A job's own random stream for Python code that draws from torch's default generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from waterflow.allocator_ext import _C


class JobStream(TorchDispatchMode):
    """Inside, random operators of this thread draw from the job's generator.

    The process has one default generator. A data loader may take its time, so it must not hold that
    one for as long as it runs: each draw is redirected by itself, and other threads see nothing.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operator, on the job's stream where it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _has_own_generator(args, kwargs):
            return func(*args, **kwargs)
        with _C.DefaultGeneratorSwap(self._generator):
            return func(*args, **kwargs)


def _has_own_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def copy_generator(generator: torch.Generator) -> torch.Generator:
    """A generator that will draw the same numbers, independently."""
    twin = torch.Generator(device=generator.device)
    twin.set_state(generator.get_state())
    return twin
