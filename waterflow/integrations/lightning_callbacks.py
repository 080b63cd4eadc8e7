"""What follows Lightning's validation: callbacks and schedulers by a metric, driven by a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.integrations.lightning_refusals import keeps_files
from waterflow.integrations.lightning_schedule import Place

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Plateau(NamedTuple):
    """A ReduceLROnPlateau, stepped at the end of every so many epochs by its metric; where that is
    not known then, an error if it is strict."""

    scheduler: Any
    monitor: str
    frequency: int
    strict: bool


class Followers(nn.Module):
    """Schedulers and callbacks that follow a metric of validation, or keep what it found: stepped
    when Lightning does it. A part of the job, so that checkpoints keep what they count."""

    def __init__(self, name: str, plateau: Plateau | None, trainer: Any) -> None:
        """Args: the job's name; the scheduler, where there is one; the Trainer, or None."""
        super().__init__()
        self._name = name
        self._plateau = plateau
        callbacks = [] if trainer is None else trainer.callbacks
        self._stopping = [each for each in callbacks if type(each).__name__ == "EarlyStopping"]
        self._saving = [each for each in callbacks if keeps_files(each)]
        self.names_of_steps: set[str] = set()  # logged by training_step
        self._found: dict[str, torch.Tensor] = {}  # by the latest validation
        self._asked: Any = None

    @property
    def needing_validation(self) -> str | None:
        """The one that needs it, by name; None: nobody does."""
        for callback in (*self._stopping, *self._saving):
            if callback.monitor is not None:
                return type(callback).__name__
        return "ReduceLROnPlateau" if self._plateau is not None else None

    @property
    def has_callbacks(self) -> bool:
        """Whether there are any that look at ends of epochs."""
        return bool(self._stopping or self._saving)

    def __bool__(self) -> bool:
        return self.has_callbacks or self._plateau is not None

    def begin(self, trainer: Any, module: LightningModule, data: Any, validated: float) -> None:
        """Before training.

        Args:
            trainer: whose callbacks they are.
            module: what is trained.
            data: a datamodule, whose hyperparameters are in files; else not looked at.
            validated: batches of a validation.
        """
        if not self.has_callbacks:
            return
        self._asked = _Asked(trainer, module, data, validated)
        for callback in self._stopping:
            callback.setup(trainer, module, "fit")
        for callback in self._saving:
            named = callback.dirpath is not None
            callback.setup(trainer, module, "fit")
            if not named:  # the logger's next folder, which is another one for the next training
                os.makedirs(callback.dirpath, exist_ok=True)

    def validated(self, found: Mapping[str, torch.Tensor], place: Place) -> bool:
        """Behind a validation; returns whether the training is to end."""
        self._found = {**self._found, **found}
        return self._call("on_validation_end", place)

    def epoch_ended(self, place: Place) -> bool:
        """At the end of an epoch, or within it, of the training; returns whether that is to end."""
        stops = self._call("on_train_epoch_end", place)
        plateau = self._plateau
        if plateau is None or not place.ends or (place.epoch + 1) % plateau.frequency:
            return stops
        if plateau.strict or plateau.monitor in self._found:
            plateau.scheduler.step(self._value(plateau.monitor, "ReduceLROnPlateau"))
        return stops

    def training_ended(self, place: Place) -> None:
        """Behind all."""
        for callback in self._saving:
            asked = self._asked.at(place._replace(epoch=place.epoch + 1), self._found)
            callback.on_train_end(asked, asked.module)

    def _call(self, hook: str, place: Place) -> bool:
        if not self.has_callbacks:
            return False
        asked = self._asked.at(place, self._found)
        for callback in (*self._stopping, *self._saving):
            if self._listens(callback, hook):
                self._check_names(callback)
                getattr(callback, hook)(asked, asked.module)
        return bool(asked.should_stop)

    def _listens(self, callback: Any, hook: str) -> bool:
        """Whether the callback will look at metrics then."""
        at_end = hook == "on_train_epoch_end"
        if callback in self._stopping:
            return bool(callback._check_on_train_epoch_end) == at_end
        return bool(callback._should_save_on_train_epoch_end(self._asked)) == at_end

    def _check_names(self, callback: Any) -> None:
        """Its metrics are those of validation, as Lightning would find them."""
        kind = type(callback).__name__
        if callback.monitor is not None:
            self._value(callback.monitor, kind)
        if kind != "ModelCheckpoint":
            return
        for name in _fields(callback.filename or "{epoch}{step}"):
            if name not in ("epoch", "step") or name in self.names_of_steps:
                self._value(name, f"{kind}(filename={callback.filename!r})")

    def _value(self, monitor: str, who: str) -> torch.Tensor:
        if monitor in self.names_of_steps:
            raise JobError(
                f"job {self._name!r}: {who} monitors {monitor!r}, which training_step logs, too: "
                "log it under another name"
            )
        if monitor not in self._found:
            known = ", ".join(map(repr, self._found)) or "nothing"
            raise JobError(
                f"job {self._name!r}: {who} monitors {monitor!r}, but validation logs {known}: "
                "log it in validation_step, or monitor one of these"
            )
        return self._found[monitor]

    def get_extra_state(self) -> dict[str, Any]:
        """What they count."""
        plateau = None if self._plateau is None else self._plateau.scheduler.state_dict()
        return {
            "plateau": plateau,
            "found": self._found,
            "stopping": [each.state_dict() for each in self._stopping],
            "saving": [{name: getattr(each, name) for name in _KEPT} for each in self._saving],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """They go on from there."""
        if self._plateau is not None:
            self._plateau.scheduler.load_state_dict(state["plateau"])
        self._found = state["found"]
        for callback, kept in zip(self._stopping, state["stopping"], strict=True):
            callback.load_state_dict(kept)
        for callback, kept in zip(self._saving, state["saving"], strict=True):
            vars(callback).update(kept)


#: What a ModelCheckpoint knows of its files.
_KEPT = (
    *("best_model_score", "best_model_path", "current_score", "best_k_models"),
    *("kth_best_model_path", "kth_value", "last_model_path"),
    *("_last_global_step_saved", "_last_checkpoint_saved"),
)


def _fields(filename: str) -> list[str]:
    """The names of a ModelCheckpoint's filename."""
    return [part.partition("}")[0].partition(":")[0] for part in filename.split("{")[1:]]


class _Asked(SimpleNamespace):
    """What callbacks look at of a Trainer, and have it do: write a file."""

    def __init__(self, trainer: Any, module: LightningModule, data: Any, validated: float) -> None:
        from lightning.pytorch.trainer.states import TrainerFn

        super().__init__(
            callback_metrics={},
            check_val_every_n_epoch=trainer.check_val_every_n_epoch,
            ckpt_path=None,
            current_epoch=0,
            data=data,
            default_root_dir=trainer.default_root_dir,
            fast_dev_run=False,
            global_rank=0,
            global_step=0,
            is_global_zero=True,
            loggers=[],
            module=module,
            num_val_batches=validated,
            sanity_checking=False,
            should_stop=False,
            state=SimpleNamespace(fn=TrainerFn.FITTING),
            strategy=trainer.strategy,
            val_check_interval=trainer.val_check_interval,
            world_size=1,
        )

    def at(self, place: Place, found: Mapping[str, torch.Tensor]) -> _Asked:
        """As it is there."""
        self.current_epoch, self.global_step = place.epoch, place.updates
        self.callback_metrics, self.should_stop = found, False
        return self

    def save_checkpoint(self, path: str, weights_only: bool | None = None) -> None:
        """Writes what `load_from_checkpoint` reads: weights and hyperparameters."""
        import lightning

        found = {
            "epoch": self.current_epoch,
            "global_step": self.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": {key: _own(value) for key, value in self.module.state_dict().items()},
        }
        for each in (self.module, self.data):
            if getattr(each, "hparams", None):
                if hasattr(each, "_hparams_name"):
                    found[each.CHECKPOINT_HYPER_PARAMS_NAME] = each._hparams_name
                found[each.CHECKPOINT_HYPER_PARAMS_KEY] = dict(each.hparams)
        self.strategy.checkpoint_io.save_checkpoint(found, path)


def _own(value: Any) -> Any:
    """A tensor without the rest of the memory that it lies in, which a file would keep."""
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone()
