"""Several optimizers, schedulers or modules of one job as one, for all who need only that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


class OptimizerSet(torch.optim.Optimizer):
    """The optimizers of a job that steps them itself: their groups and their state together.

    Attributes:
        members: the optimizers.
    """

    def __init__(self, members: Iterable[torch.optim.Optimizer]) -> None:
        """Takes the optimizers; what they hold stays theirs."""
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, one optimizer's after another's."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of all: another dictionary each time, around their own entries. Where several
        have state of a parameter, a later one's entries have names of their own."""
        found: dict[Any, Any] = {}
        for number, member in enumerate(self.members):
            for parameter, entries in member.state.items():
                if parameter in found and isinstance(entries, dict):
                    named = {(number, key): value for key, value in entries.items()}
                    found[parameter] = found[parameter] | named
                else:
                    found[parameter] = entries
        return found

    def __repr__(self) -> str:
        return f"OptimizerSet({', '.join(map(repr, self.members))})"


def optimizers_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a job's optimizer consists of."""
    return optimizer.members if isinstance(optimizer, OptimizerSet) else (optimizer,)


class SchedulerSet:
    """The schedulers of a job, stepped one after another.

    Attributes:
        members: the schedulers.
    """

    def __init__(self, members: Iterable[Any]) -> None:
        """Takes the schedulers."""
        self.members = tuple(members)

    def step(self) -> None:
        """Steps each; see `training_step.step_scheduler` for those that follow a metric."""
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by its place."""
        return {str(place): member.state_dict() for place, member in enumerate(self.members)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives each its state."""
        for place, member in enumerate(self.members):
            member.load_state_dict(state[str(place)])


def schedulers_in(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers that a job's scheduler consists of; none where it has none."""
    if scheduler is None:
        return ()
    return scheduler.members if isinstance(scheduler, SchedulerSet) else (scheduler,)


def follows_metric(scheduler: Any) -> bool:
    """Whether a job's scheduler, or one of them, has to be told a number of the step before."""
    return any(isinstance(member, ReduceLROnPlateau) for member in schedulers_in(scheduler))


def module_of(modules: Any) -> Any:
    """One module that holds these; a module, or what is none, as it is.

    Raises:
        TypeError, KeyError: names or members that torch's containers refuse.
    """
    if isinstance(modules, nn.Module):
        return modules
    if isinstance(modules, Mapping):
        return nn.ModuleDict(modules)  # type: ignore[arg-type]
    return nn.ModuleList(modules) if isinstance(modules, (list, tuple)) else modules
