"""Lightning's validation as the evaluations of a job, and what follows them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.integrations.lightning_loop import State, begun, logging
from waterflow.job.job import STOP


class Validation:
    """Validates a module as Lightning's loop does, in the training's random streams, says what it
    has logged, and lets those know that follow a metric of it."""

    def __init__(
        self,
        name: str,
        loader: Iterable[Any],
        limit: int | None,
        state: State,
        followers: Followers,
    ) -> None:
        """Args: the job's name; the loader; how many batches of it at most; what the module finds
        as its trainer; who follows."""
        self._name = name
        self._loader = loader
        self._limit = limit
        self._state = state
        self._followers = followers

    def __call__(self, module: Any) -> Any:
        """What `Job.evaluate` answers."""
        found = self._validate(module)
        values = {name: float(value) for name, value in found.items()} or None
        stops = self._followers.follow(found, self._state.current_epoch)
        return (values, STOP) if values and stops else values

    def _validate(self, module: Any) -> dict[str, torch.Tensor]:
        parameters = list(inspect.signature(module.validation_step).parameters)
        means: dict[str, _Mean] = {}
        self._state.training, self._state.validating = False, True
        try:
            batches = begun(self._loader, self._limit)  # draws a seed, before the hooks
            module.on_validation_start()
            module.on_validation_epoch_start()
            for index, batch in enumerate(batches):
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                with logging(module) as logged:
                    module.validation_step(*(batch, index, 0)[: len(parameters)])
                size = _batch_size(batch)
                for key, value in logged.items():
                    means.setdefault(key, _Mean()).add(value, size)
            with logging(module) as logged:
                module.on_validation_epoch_end()
            module.on_validation_end()
        finally:
            self._state.training, self._state.validating = True, False
        values = {key: mean.value for key, mean in means.items()}
        return values | {key: _number(value) for key, value in logged.items()}


class Followers(nn.Module):
    """Schedulers and callbacks that follow a metric of validation: ReduceLROnPlateau by its
    `monitor`, and EarlyStopping. A part of the job, so that checkpoints keep what they count."""

    def __init__(self, name: str, plateau: tuple[Any, str] | None, stopping: Sequence[Any]) -> None:
        """Args: the job's name; the scheduler and its monitor, where there is one; callbacks."""
        super().__init__()
        self._name = name
        self._plateau = plateau
        self._stopping = stopping
        self.names_of_steps: set[str] = set()  # logged by training_step

    def follow(self, found: Mapping[str, torch.Tensor], epoch: int) -> bool:
        """After a validation; returns whether the training is to end."""
        stops = False
        for callback in self._stopping:
            self._value(found, callback.monitor, "EarlyStopping")
            asked = _Asked(found, epoch)
            callback._run_early_stopping_check(asked)
            stops = stops or asked.should_stop
        if self._plateau is not None:
            scheduler, monitor = self._plateau
            scheduler.step(self._value(found, monitor, "ReduceLROnPlateau"))
        return stops

    def _value(self, found: Mapping[str, torch.Tensor], monitor: str, who: str) -> torch.Tensor:
        if monitor not in found:
            known = ", ".join(map(repr, found)) or "nothing"
            raise JobError(
                f"job {self._name!r}: {who} monitors {monitor!r}, but validation logs {known}: "
                "log it in validation_step, or monitor one of these"
            )
        if monitor in self.names_of_steps:
            raise JobError(
                f"job {self._name!r}: {who} monitors {monitor!r}, which training_step logs, too: "
                "log it under another name"
            )
        return found[monitor]

    def get_extra_state(self) -> dict[str, Any]:
        """What they count."""
        plateau = None if self._plateau is None else self._plateau[0].state_dict()
        return {"plateau": plateau, "stopping": [each.state_dict() for each in self._stopping]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """They go on from there."""
        if self._plateau is not None:
            self._plateau[0].load_state_dict(state["plateau"])
        for callback, kept in zip(self._stopping, state["stopping"], strict=True):
            callback.load_state_dict(kept)


class _Asked(SimpleNamespace):
    """What EarlyStopping looks at of a Trainer."""

    def __init__(self, found: Mapping[str, torch.Tensor], epoch: int) -> None:
        alone = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
        super().__init__(
            callback_metrics=found,
            current_epoch=epoch,
            fast_dev_run=False,
            global_rank=0,
            should_stop=False,
            strategy=alone,
            world_size=1,
        )


class _Mean:
    """Over batches, by their sizes; of a metric of torchmetrics, what that computes."""

    def __init__(self) -> None:
        self._sum = torch.zeros(())
        self._count = 0
        self._metric: Any = None

    def add(self, value: Any, size: int) -> None:
        """Takes in the value of one batch."""
        if _is_metric(value):
            self._metric = value
            return
        self._sum = self._sum + torch.as_tensor(value).detach().cpu() * size
        self._count += size

    @property
    def value(self) -> torch.Tensor:
        """Of all batches; a metric begins anew."""
        return _number(self._sum / self._count if self._metric is None else self._metric)


def _is_metric(value: Any) -> bool:
    return hasattr(value, "compute") and hasattr(value, "reset")


def _number(value: Any) -> torch.Tensor:
    if _is_metric(value):
        computed = torch.as_tensor(value.compute())
        value.reset()
        return computed
    return torch.as_tensor(value).detach()


def _batch_size(batch: Any) -> int:
    """As Lightning finds it: the first dimension of the first tensor."""
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))
