"""Lightning's validation as the evaluations of a job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from waterflow.integrations.lightning_callbacks import Followers
from waterflow.integrations.lightning_logging import Epoch, logging
from waterflow.integrations.lightning_loop import Counted, begun
from waterflow.integrations.lightning_schedule import Schedule
from waterflow.job.job import STOP


class Validation:
    """Validates a module as Lightning's loop does, in the training's random streams, says what it
    has logged, and lets those know that follow a metric of it."""

    def __init__(
        self,
        loader: Iterable[Any] | None,
        limit: int | None,
        schedule: Schedule,
        training: Counted,
        followers: Followers,
    ) -> None:
        """Args: the loader, None: nothing is validated; how many batches of it at most; when; the
        training's batches; who follows."""
        self._loader = loader
        self._limit = limit
        self._schedule = schedule
        self._training = training
        self._state = training.state
        self._followers = followers

    def __call__(self, module: Any) -> Any:
        """What `Job.evaluate` answers."""
        place, state = self._training.place, self._state
        values, stops = None, False
        state.global_step = place.updates
        if self._loader is not None and self._schedule.is_due(place):
            found = self._validate(module, self._loader)
            values = {name: float(value) for name, value in found.items()} or None
            stops = self._followers.validated(found, place)
        at_limit = place.updates == state.max_steps
        if place.ends or at_limit or stops:
            stops = self._followers.epoch_ended(place) or stops
        if stops or at_limit or (place.ends and place.epoch + 1 == state.max_epochs):
            self._followers.training_ended(place)
        if stops:
            return (values, STOP) if values else STOP
        return values

    def _validate(self, module: Any, loader: Iterable[Any]) -> dict[str, torch.Tensor]:
        parameters = list(inspect.signature(module.validation_step).parameters)
        job = self._state.job
        epochs: list[Epoch] = []  # of each hook: where two log one name, the later one's counts

        def hook(function: Callable[[], Any]) -> None:
            epochs.append(Epoch(job))
            with logging(module, job) as logged:
                function()
            epochs[-1].add(logged, lambda: 1)

        self._state.training, self._state.validating = False, True
        try:
            batches = begun(loader, self._limit)  # draws a seed, before the hooks
            hook(module.on_validation_start)
            hook(module.on_validation_epoch_start)
            epochs.append(during := Epoch(job))
            for index, batch in enumerate(batches):
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                with logging(module, job) as logged:
                    module.validation_step(*(batch, index, 0)[: len(parameters)])
                during.add(logged, functools.partial(_batch_size, batch))
            hook(module.on_validation_epoch_end)
            module.on_validation_end()
        finally:
            self._state.training, self._state.validating = True, False
        return {name: value for epoch in epochs for name, value in epoch.values().items()}


def _batch_size(batch: Any) -> int:
    """As Lightning finds it: the first dimension of the first tensor."""
    from lightning.pytorch.utilities.data import extract_batch_size

    return int(extract_batch_size(batch))
