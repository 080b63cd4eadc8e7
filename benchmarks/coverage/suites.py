"""What a suite is: named cases, each of one or several trials, made when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module

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


#: name -> (module, factory); modules are imported only where the suite is wanted.
_SUITES = {
    "transformers": ("families", "Families"),
    "timm": ("vision", "Timm"),
    "torchvision": ("vision", "TorchVision"),
    "module_db": ("tables", "Modules"),
    "optim_db": ("tables", "Optimizers"),
    "op_db": ("tables", "Operators"),
}
SUITES = tuple(_SUITES)


def load(name: str) -> Suite:
    """The suite of that name.

    Raises:
        MissingSuiteError: what it needs is not installed, or does not work with this torch.
    """
    module, factory = _SUITES[name]
    try:
        make: Callable[[], Suite] = getattr(import_module(f"benchmarks.coverage.{module}"), factory)
        return make()
    except (ImportError, RuntimeError) as error:  # an extension built for another torch
        raise MissingSuiteError(f"{name}: {error}") from error
