"""What of Lightning a job takes over, and what it refuses by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.integrations.lightning_loop import length_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: What a module may have of its own: called as Lightning would, or by nobody while it trains.
_TAKEN_OVER = frozenset(
    {
        *("training_step", "configure_optimizers", "forward", "train_dataloader"),
        *("val_dataloader", "test_dataloader", "predict_dataloader", "test_step", "predict_step"),
        *("validation_step", "on_validation_epoch_start", "on_validation_epoch_end"),
        *("on_validation_start", "on_validation_end", "prepare_data", "setup"),
        *("on_fit_start", "on_train_start", "configure_model"),
        *("on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end"),
        *("on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end"),
        *("on_test_batch_start", "on_test_batch_end", "on_predict_batch_start"),
        *("on_predict_batch_end", "on_test_model_eval", "on_test_model_train"),
        *("on_predict_model_eval", "on_predict_model_train"),
        *("train", "eval", "extra_repr", "example_input_array"),
    }
)
#: Methods that a datamodule may have of its own, likewise.
_DATA_TAKEN_OVER = frozenset(
    {
        *("prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader"),
        *("predict_dataloader", "on_exception"),
    }
)
#: What to do instead, where that is not to be done in a step.
_REMEDIES = {
    **dict.fromkeys(
        ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
        "do it in training_step and validation_step, or in the dataset or its collate_fn",
    ),
    "configure_callbacks": "give the callbacks to the Trainer",
    "teardown": "do it when wf.run has returned",
}
#: Callbacks of a Trainer that change no number.
_CALLBACKS = (
    "DeviceStatsMonitor",
    "LearningRateMonitor",
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
    "Timer",
)
#: The type in which `training_step` runs where it can.
_PRECISIONS: Mapping[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}
#: What a Trainer is by default, where the job does nothing else.
_DEFAULTS: Mapping[str, Any] = {
    "barebones": False,
    "fast_dev_run": False,
    "min_epochs": None,
    "min_steps": None,
    "num_devices": 1,
    "num_nodes": 1,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
    "world_size": 1,
}
#: What a Trainer keeps under another name, and is not asked for by default.
_PRIVATE = {"_detect_anomaly": "detect_anomaly", "_model_registry": "model_registry"}
#: The kinds of its strategy and of what its precision is made by, on one device.
_PLUGINS = ("SingleDeviceStrategy", "Precision", "MixedPrecision")


class Refusal:
    """Raises JobError where a condition does not hold."""

    def __init__(self, name: str) -> None:
        self.job = name

    def __call__(self, condition: object, what: str, remedy: str) -> None:
        """Raises JobError, with the remedy, where the condition does not hold."""
        if not condition:
            raise JobError(f"job {self.job!r}: from_lightning cannot take over {what}: {remedy}")


def check_module(module: LightningModule, require: Refusal) -> None:
    """Refuses a module that does what a job would not."""
    from lightning.pytorch import LightningModule

    if not isinstance(module, LightningModule):
        raise JobError(f"from_lightning takes a LightningModule, got {module!r}")
    kind = type(module).__name__
    require(
        module.automatic_optimization,
        f"{kind}'s manual optimization",
        "write the step as a function and give it to Job(step=...)",
    )
    _check_methods(module, LightningModule, _TAKEN_OVER, require)


def check_data(data: Any, require: Refusal) -> None:
    """Refuses a datamodule that does what a job would not."""
    from lightning.pytorch import LightningDataModule

    if isinstance(data, LightningDataModule):
        _check_methods(data, LightningDataModule, _DATA_TAKEN_OVER, require)


def _check_methods(of: Any, known: type, taken_over: Collection[str], require: Refusal) -> None:
    for method in dir(known):
        if method.startswith("_") or method in taken_over:
            continue
        inherited = inspect.getattr_static(known, method)
        if not callable(getattr(known, method)):
            continue
        own = inspect.getattr_static(of, method) is not inherited
        remedy = _REMEDIES.get(method, "do it in training_step, or in the job's on_step")
        require(not own, f"{type(of).__name__}.{method}", remedy)


def limits(trainer: Trainer, require: Refusal) -> dict[str, Any]:
    """How long a Trainer trains, as arguments of a job; refuses one that does more than that."""
    for attribute, default in _DEFAULTS.items():
        value = getattr(trainer, attribute, default)
        require(value == default, f"Trainer({attribute}={value!r})", f"leave it at {default!r}")
    precision = trainer.precision
    require(
        precision in _PRECISIONS,
        f"Trainer(precision={precision!r})",
        f"take one of {', '.join(_PRECISIONS)}",
    )
    for private, argument in _PRIVATE.items():
        value = getattr(trainer, private, None)
        require(not value, f"Trainer({argument}={value!r})", "leave it out")
    for argument in ("strategy", "precision_plugin"):
        value = type(getattr(trainer, argument))
        plain = value.__name__ in _PLUGINS and value.__module__.startswith("lightning.")
        require(plain, f"the Trainer's {argument} {value.__name__}", "leave it out")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check_callback(callback, require)
    found: dict[str, Any] = {}
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        found["epochs"] = trainer.max_epochs
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        found["steps"] = trainer.max_steps
    require(found, "a Trainer without an end", "say max_epochs or max_steps")
    found["accumulate"] = trainer.accumulate_grad_batches
    found["autocast"] = _PRECISIONS[precision]
    return found


def _check_callback(callback: Any, require: Refusal) -> None:
    kind = type(callback).__name__
    own = not type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    if kind == "ModelCheckpoint" and not own:
        for asked in ("every_n_train_steps", "train_time_interval", "save_on_exception"):
            value = getattr(callback, f"_{asked}", getattr(callback, asked, None))
            remedy = "keep files by epochs or validations; run(checkpoint=...) keeps the state"
            require(not value, f"ModelCheckpoint({asked}={value!r})", remedy)
        return
    timed = kind == "Timer" and getattr(callback, "_duration", None) is not None
    require(not timed, "Timer(duration=...)", "stop the job by its on_step (wf.STOP)")
    require(
        (kind in _CALLBACKS or kind == "EarlyStopping") and not own,
        f"the callback {kind}",
        "leave it out and use the job's on_step or evaluate",
    )


def keeps_files(callback: Any) -> bool:
    """Whether it is a ModelCheckpoint that was asked for anything. A Trainer has one by default,
    which nothing is known of to be asked: it keeps nothing of a job."""
    if type(callback).__name__ != "ModelCheckpoint":
        return False
    asked = ("monitor", "dirpath", "filename", "save_last", "save_weights_only")
    given = any(getattr(callback, name) for name in asked)
    return given or callback.save_top_k != 1 or callback.every_n_epochs != 1


def limit_of(loader: Any, limit: float, which: str, require: Refusal) -> int | None:
    """The batches of an epoch at most, by ``limit_train_batches`` or ``limit_val_batches``; None
    where that is no limit."""
    if isinstance(limit, float) and limit == 1.0:
        return None
    given = f"limit_{which}_batches={limit!r}"
    if limit == 0 and which == "val":
        return 0
    length = length_of(loader)
    require(length is not None, f"{given} of a loader without length", "leave it out")
    count = min(length or 0, limit) if isinstance(limit, int) else int((length or 0) * limit)
    require(count or which == "val", f"{given}, which leaves no batch", "let it be larger")
    return int(count)


def clipping(
    trainer: Trainer, module: nn.Module, optimizer: torch.optim.Optimizer, require: Refusal
) -> float | None:
    """The norm to which gradients are clipped; Lightning does it in the optimizer's order."""
    norm = trainer.gradient_clip_val
    if not norm:
        return None
    by_value = str(getattr(trainer.gradient_clip_algorithm, "value", "")) == "value"
    require(not by_value, 'gradient_clip_algorithm="value"', "clip by the norm")
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    require(
        listed == [id(p) for p in module.parameters() if id(p) in set(listed)],
        "clipping of parameters that the optimizer has in another order than the module",
        "list the optimizer's parameters in the order of module.parameters()",
    )
    return float(norm)
