"""The batches of a Trainer of Hugging Face Transformers as those of a job."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from waterflow.common.errors import JobError

if TYPE_CHECKING:
    from transformers import Trainer

#: The number by which a loss is divided, among the inputs.
ITEMS = "num_items_in_batch"


class Updates:
    """The batches of a Trainer as its loop draws them: for each update one, or a list of some.

    Attributes:
        count: updates of the whole training.
        in_epoch: those of an epoch.
        given: those that batches have been drawn for.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Args: trainer: whose."""
        self._trainer = trainer
        self._loader: Any = None
        self._epoch = 0
        with torch.random.fork_rng(devices=[]):
            loader = trainer.get_train_dataloader()
            values = trainer.set_initial_training_values(trainer.args, loader)
        _, self.in_epoch, _, _, _, self._batches, self.count = values
        self.given = 0
        #: Where the streams were before the latest update's batches were drawn, where checkpoints
        #: are taken, and in a training that goes on, where they were then, and for which update.
        self.drawn_at: tuple[int, Any] | None = None
        self.to_draw_at: tuple[int, Any] | None = None
        self._keeps_place = False

    def epoch_at(self, update: int) -> float:
        """The Trainer's ``state.epoch`` after an update, by batches."""
        epoch, before = divmod(update - 1, self.in_epoch)
        drawn = (before + 1) * self._trainer.args.gradient_accumulation_steps
        return epoch + min(drawn, self._batches) / self._batches

    @property
    def called(self) -> tuple[Any, ...]:
        """What its loaders call to make batches; asked for by `capture.reach`."""
        return (self._trainer.data_collator,)

    @property
    def has_begun(self) -> bool:
        """Whether training has, be it in a process before."""
        return self._loader is not None

    def begin(self) -> None:
        """Makes the loader when training begins, in the job's random streams: its sampler takes its
        seed from there. The other streams begin as `transformers.set_seed` would have them."""
        if self._loader is None:
            random.seed(self._trainer.args.seed)
            np.random.seed(self._trainer.args.seed)
            self._loader = self._trainer.get_train_dataloader()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        for part in (self._loader, *_inner_samplers(self._loader)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        self._epoch += 1
        accumulated = self._trainer.args.gradient_accumulation_steps
        batches = iter(self._loader)
        for update in range(self.in_epoch):
            last = update == self.in_epoch - 1
            wanted = (self._batches % accumulated if last else 0) or accumulated
            self._note_streams()
            device = self._trainer.args.device
            samples, items = self._trainer.get_batch_samples(batches, wanted, device)
            if not samples:
                return
            inputs = [_with_items(sample, items) for sample in samples]
            self.given += 1
            yield inputs if accumulated > 1 else inputs[0]

    def _note_streams(self) -> None:
        """Before batches are drawn. accelerate's loaders are a batch ahead, and a collator may
        draw: when a checkpoint's batches are drawn again, the last is to begin where it did."""
        if self.to_draw_at is not None and self.to_draw_at[0] == self.given:
            _set_streams(self.to_draw_at[1])
            self.to_draw_at = None
        if self._keeps_place:
            self.drawn_at = self.given, _streams()

    def state_dict(self) -> dict[str, Any]:
        """Where the data are before an epoch, for checkpoints."""
        if self._trainer.args.dataloader_persistent_workers:
            raise JobError(
                "its Trainer has dataloader_persistent_workers=True: the workers' random streams "
                "live in other processes and would be lost: leave it out, to take checkpoints"
            )
        self._keeps_place = True
        generators = {path: each.get_state() for path, each in _generators(self._loader).items()}
        begun = {"has_begun": self.has_begun, "generators": generators}
        return {"epoch": self._epoch, "given": self.given, **begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on before an epoch, as a checkpoint knows it."""
        self._keeps_place = True
        self._epoch, self.given = state["epoch"], state["given"]
        if state["has_begun"]:
            self._loader = self._trainer.get_train_dataloader()
            for path, generator in _generators(self._loader).items():
                generator.set_state(state["generators"][path])


def _inner_samplers(loader: Any) -> Iterator[Any]:
    wrapper = getattr(loader, "batch_sampler", None)
    inner = getattr(wrapper, "batch_sampler", None)
    if inner is not None:
        yield inner


def _generators(loader: Any, path: str = "") -> dict[str, torch.Generator]:
    """Those that a loader and its samplers draw from, by where they are."""
    found: dict[str, torch.Generator] = {}
    if isinstance(generator := getattr(loader, "generator", None), torch.Generator):
        found[path] = generator
    for name in ("batch_sampler", "sampler", "base_dataloader"):
        inner = getattr(loader, name, None)
        if inner is not None and inner is not loader:
            found |= _generators(inner, f"{path}.{name}")
    return found


def _streams() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }


def _set_streams(streams: Mapping[str, Any]) -> None:
    torch.set_rng_state(streams["torch"])
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])


class Notes(nn.Module):
    """What a Trainer and its data have noted, as a part of the job, so that checkpoints keep it."""

    #: Attributes that no step can read, as none knows of this module.
    unread_by_steps = frozenset({"_trainer", "_updates", "_stopping"})

    def __init__(self, trainer: Trainer, updates: Updates) -> None:
        """Args: trainer: whose; updates: its."""
        super().__init__()
        from transformers import EarlyStoppingCallback

        self._trainer, self._updates = trainer, updates
        #: Whether the schedule is stepped by evaluations, so that it is no scheduler of the job.
        self._follows = isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        callbacks = trainer.callback_handler.callbacks
        self._stopping = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]

    def get_extra_state(self) -> dict[str, Any]:
        """What is to be known when the training goes on."""
        state = self._trainer.state
        best = None if state.best_metric is None else float(state.best_metric)
        return {
            "drawn_at": self._updates.drawn_at,
            "log": state.log_history,
            "best": (best, state.best_global_step, state.best_model_checkpoint),
            "plateau": self._trainer.lr_scheduler.state_dict() if self._follows else None,
            "patience": [each.early_stopping_patience_counter for each in self._stopping],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The training goes on from there."""
        self._updates.to_draw_at = state["drawn_at"]
        noted: Any = self._trainer.state
        noted.log_history = state["log"]
        noted.best_metric, noted.best_global_step, noted.best_model_checkpoint = state["best"]
        if state["plateau"] is not None:
            self._trainer.lr_scheduler.load_state_dict(state["plateau"])
        for callback, counter in zip(self._stopping, state["patience"], strict=True):
            callback.early_stopping_patience_counter = counter


def _with_items(inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
    """The inputs, and with them the number by which the loss is divided, where there is one."""
    return dict(inputs) if items is None else {**inputs, ITEMS: items}
