"""A LightningModule as a job, its loop being that of Lightning's automatic optimization."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from waterflow.integrations.lightning_callbacks import Followers, Plateau
from waterflow.integrations.lightning_evaluation import Validation
from waterflow.integrations.lightning_logging import logging
from waterflow.integrations.lightning_loop import (
    Counted,
    State,
    asks_where_it_is,
    length_of,
    loss_of,
    reads_number,
)
from waterflow.integrations.lightning_refusals import (
    Refusal,
    check_data,
    check_module,
    clipping,
    keeps_files,
    limit_of,
    limits,
)
from waterflow.integrations.lightning_schedule import Schedule
from waterflow.job.evaluation import HostEvaluation
from waterflow.job.job import Job

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer


def from_lightning(
    module: LightningModule,
    data: LightningDataModule | Iterable[Any] | None = None,
    trainer: Trainer | None = None,
    *,
    name: str | None = None,
    **options: Any,
) -> Job:
    """The training that ``Trainer(...).fit(module, data)`` would do, as a job.

    Its losses and weights are, bit for bit, those of ``torch.manual_seed(seed)`` followed by
    ``fit``: ``training_step`` and ``configure_optimizers`` of the module, its loader, the
    scheduler by its interval. What ``training_step`` logs are the metrics of the job's report (with
    ``on_epoch=True`` the batch's size, too: `JobReport.epoch_means`); the
    module is validated when the Trainer would, and what ``validation_step`` logs, averaged, are the
    evaluations.

    Args:
        module: its optimization is automatic, with one optimizer.
        data: a datamodule, a loader of training batches, or None for the module's own.
        trainer: how long (``max_epochs``, ``max_steps``, `EarlyStopping`), ``gradient_clip_val``,
            ``accumulate_grad_batches``, ``limit_train_batches``, ``limit_val_batches``,
            ``val_check_interval``, ``check_val_every_n_epoch``, ``precision``, and a
            `ModelCheckpoint` that was asked for something, by epochs or validations: its files
            hold weights and hyperparameters, for ``load_from_checkpoint``. Nothing else may differ
            from a plain Trainer on one device. None: say ``epochs`` or ``steps``.
        name: the job's name; None: the module's class.
        options: further arguments of `Job`, such as ``seed`` or ``priority``.

    Raises:
        JobError: something that the job would not do as Lightning does; names it, and the remedy.
        ImportError: lightning is not there; ``pip install 'waterflow[lightning]'``.
    """
    name = name or type(module).__name__
    require = Refusal(name)
    check_module(module, require)
    check_data(data, require)
    limit_train, limit_val = None, None
    if trainer is not None:
        options = {**limits(trainer, require), **options}
    state = module.trainer = State(name, options)  # type: ignore[assignment]
    train, validation = _loaders(module, data, state, require)
    if trainer is not None:
        limit_train = limit_of(train, trainer.limit_train_batches, "train", require)
        if validation is not None:
            limit_val = limit_of(validation, trainer.limit_val_batches, "val", require)
            validation = None if limit_val == 0 else validation
    numbered, accumulated = reads_number(module), options.get("accumulate", 1)
    saves = trainer is not None and any(map(keeps_files, trainer.callbacks))  # type: ignore[attr-defined]
    counts = limit_train is not None or validation is not None or length_of(train) is None
    counts = counts or numbered or saves or asks_where_it_is(module)
    state.begin(lambda: len(loader), counts)
    counted = Counted(state, train, numbered, accumulated, limit_train)
    loader = counted if counts else train
    _undrawn(require, module, "on_fit_start")
    optimizer, scheduler, interval, plateau = _optimizers(module, require)
    if trainer is not None:
        options.setdefault("clip_grad_norm", clipping(trainer, module, optimizer, require))
    followers = Followers(name, plateau, trainer)
    if (needing := followers.needing_validation) is not None:
        require(
            validation is not None, f"{needing} without validation", "validate, or leave it out"
        )
    _undrawn(require, module, "on_train_start")
    if followers:
        require("modules" not in options, "modules= beside its callbacks", "put them into it")
        options["modules"] = followers
        batches = 0 if validation is None else limit_val or length_of(validation) or math.inf
        followers.begin(trainer, module, data, batches)
    if validation is not None or followers:
        for option in sorted({"evaluate", "evaluate_every"} & set(options)):
            remedy = "leave it out, or validation_step and ModelCheckpoint"
            require(False, f"{option}={options[option]!r} of a module that validates", remedy)
        length = length_of(counted)
        schedule = Schedule(trainer, length, accumulated, validation is not None, require)
        validate = Validation(validation, limit_val, schedule, counted, followers)
        options["evaluate"] = HostEvaluation(validate)
        if followers.has_callbacks or not schedule.is_each_epochs_end:
            options["evaluate_every"] = schedule.every(options.get("steps"))
    return Job(
        name,
        model=module,
        optimizer=optimizer,
        loss=loss_of(module, name, numbered, followers.names_of_steps),
        data=loader,
        scheduler=scheduler,
        scheduler_every=interval,
        **options,
    )


def _loaders(module: LightningModule, data: Any, state: State, require: Refusal) -> tuple[Any, Any]:
    """The loaders of training and of validation; None where nothing is validated."""
    from lightning.pytorch import LightningDataModule, LightningModule

    if isinstance(data, LightningDataModule):
        data.trainer = state  # type: ignore[assignment]
        _undrawn(require, data, "prepare_data")
        _undrawn(require, data, "setup", "fit")
    _undrawn(require, module, "prepare_data")
    _undrawn(require, module, "setup", "fit")
    _undrawn(require, module, "configure_model")
    source = module if data is None else data
    if not isinstance(source, (LightningDataModule, LightningModule)):
        return data, None
    validation = None
    if _has_own(module, "validation_step") and _has_own(source, "val_dataloader"):
        validation = _undrawn(require, source, "val_dataloader")
        one = isinstance(validation, torch.utils.data.DataLoader)
        require(one, f"val_dataloader() -> {validation!r}", "return one DataLoader")
    return _undrawn(require, source, "train_dataloader"), validation


def _undrawn(require: Refusal, of: Any, hook: str, *arguments: Any) -> Any:
    """What a hook that runs before the training returns; its job's streams begin at the seed, and
    would not go on from where the hook has left those of the process."""
    before = torch.get_rng_state()
    logged: list[Any] = []
    with ExitStack() as noted:
        if isinstance(of, torch.nn.Module):  # a datamodule's `log` would be something of its own
            logged = noted.enter_context(logging(of, require.job))
        found = getattr(of, hook)(*arguments)
    require(not logged, f"self.log in {hook}()", "log in training_step or in validation")
    require(
        torch.equal(before, torch.get_rng_state()),
        f"{hook}() that draws random numbers",
        "draw before the job is made, or from a generator of your own, such as "
        "random_split(..., generator=torch.Generator().manual_seed(0))",
    )
    return found


def _has_own(of: Any, method: str) -> bool:
    return not _is_librarys_function(inspect.getattr_static(type(of), method, None))


def _is_librarys_function(function: Any) -> bool:
    return function is None or str(getattr(function, "__module__", "")).startswith("lightning.")


def _optimizers(
    module: LightningModule, require: Refusal
) -> tuple[torch.optim.Optimizer, Any, str, Plateau | None]:
    """The one optimizer, its scheduler or None, how often that is stepped, and in its place a
    ReduceLROnPlateau and the metric that it follows."""
    found: Any = _undrawn(require, module, "configure_optimizers")
    schedulers: Sequence[Any] = ()
    monitor: str | None = None
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)):
        found, schedulers = found
    if isinstance(found, (list, tuple)):
        require(
            len(found) == 1,
            f"{len(found)} optimizers",
            "write the step as a function and give it to Job(step=...)",
        )
        found = found[0]
    if isinstance(found, Mapping):
        if "lr_scheduler" in found:
            schedulers, monitor = [found["lr_scheduler"]], found.get("monitor")
        found = found.get("optimizer")
    require(
        isinstance(found, torch.optim.Optimizer),
        f"configure_optimizers() -> {found!r}",
        "return an optimizer of torch.optim",
    )
    require(len(schedulers) <= 1, f"{len(schedulers)} schedulers", "chain them to one")
    if not schedulers:
        return found, None, "epoch", None
    scheduler = schedulers[0]
    settings: Mapping[str, Any] = {}
    if isinstance(scheduler, Mapping):
        settings, scheduler = scheduler, scheduler["scheduler"]
    frequency, interval = settings.get("frequency", 1), settings.get("interval", "epoch")
    follows = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    told = settings.get("reduce_on_plateau", follows)
    require(told == follows, f"a scheduler's reduce_on_plateau={told}", "leave it out")
    if not follows:
        require(frequency == 1, f"a scheduler's frequency={frequency}", "let it be 1")
        return found, scheduler, interval, None
    monitor = settings.get("monitor", monitor)
    require(monitor is not None, "ReduceLROnPlateau without monitor", "name the metric")
    by_steps = "ReduceLROnPlateau with interval='step'"
    require(interval == "epoch", by_steps, "let it follow each epoch's validation")
    strict = settings.get("strict", True)
    return found, None, interval, Plateau(scheduler, str(monitor), frequency, strict)
