"""What a suite is: named cases, each of one or several trials, made when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.coverage.trial import Trial


class MissingSuiteError(Exception):
    """What a suite needs is not installed; says what."""


class Suite(ABC):
    """A table of cases. It is made anew in each worker, from its name."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The cases' names, each once."""

    @abstractmethod
    def trials(self, name: str) -> Sequence[Trial]:
        """A case's trials; empty where there is nothing in it that can be trained."""


#: name -> where the suite is; modules are imported only where it is wanted.
_PLACES = {
    "transformers": "benchmarks.coverage.families:Families",
    "timm": "benchmarks.coverage.vision:Timm",
    "torchvision": "benchmarks.coverage.vision:TorchVision",
    "module_db": "benchmarks.coverage.tables:Modules",
    "optim_db": "benchmarks.coverage.tables:Optimizers",
    "op_db": "benchmarks.coverage.tables:Operators",
}
SUITES = tuple(_PLACES)


def load(name: str, **options: Any) -> Suite:
    """The suite of that name, or at ``module:class``.

    Raises:
        MissingSuiteError: what it needs is not installed, or does not work with this torch.
    """
    module, _, kind = _PLACES.get(name, name).partition(":")
    try:
        make: Callable[..., Suite] = getattr(import_module(module), kind)
        return make(**options)
    except (ImportError, RuntimeError) as error:  # an extension built for another torch
        raise MissingSuiteError(f"{name}: {error}") from error
