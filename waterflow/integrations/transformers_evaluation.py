"""The evaluations of a Trainer's training loop as those of a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from waterflow.integrations.transformers_data import Updates
from waterflow.integrations.transformers_saving import Saving
from waterflow.job.evaluation import HostEvaluation
from waterflow.job.job import STOP

if TYPE_CHECKING:
    from transformers import Trainer

#: What the Trainer adds beside the loss and the user's metrics: times, others in every run.
_TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Evaluations:
    """Evaluates a Trainer's model where its training loop would, by ``trainer.evaluate()``.

    What they draw (a loader draws a seed whenever it is gone through) is drawn from the training's
    random streams, as in the loop.
    """

    def __init__(self, trainer: Trainer, updates: Updates) -> None:
        """Args beyond the obvious: updates: the Trainer's."""
        self._trainer, self._updates = trainer, updates
        args = trainer.args
        self._by_epochs = str(args.eval_strategy.value) == "epoch"
        wanted = args.eval_steps or 0
        steps = math.ceil(updates.count * wanted) if wanted < 1 else int(wanted)
        self._period = updates.in_epoch if self._by_epochs else max(1, steps)
        self._saving = Saving(trainer, updates)

    def options(self) -> dict[str, Any]:
        """The arguments of `Job` for them."""
        return {
            "evaluate": HostEvaluation(self._evaluate, self._trainer.args.eval_on_start),
            "evaluate_every": math.gcd(self._period, self._saving.period, self._updates.count),
        }

    def _is_due(self, step: int) -> bool:
        if step == 0:  # asked once, but for a training that goes on before its first step
            return not self._updates.has_begun
        args, last = self._trainer.args, self._updates.count
        since = self._updates.epoch_at(step) if self._by_epochs else step
        return (step % self._period == 0 or step == last) and args.eval_delay <= since

    def _evaluate(self, model: nn.Module) -> Any:
        step, trainer = self._updates.given, self._trainer
        is_due = self._is_due(step)
        if step == 0 and not is_due:
            return None
        self._updates.begin()
        state: Any = trainer.state
        state.global_step, state.epoch = step, self._updates.epoch_at(step) if step else 0
        found, is_new_best = self._found(step) if is_due else (None, False)
        stops = bool(trainer.control.should_training_stop)
        if step:
            self._saving.act(model, step, is_new_best)
            if stops or step == self._updates.count:
                self._saving.end()
        # Callbacks are told by `trainer.evaluate()`; that of early stopping answers so.
        if stops:
            return STOP if found is None else (found, STOP)
        return found

    def _found(self, step: int) -> tuple[dict[str, float], bool]:
        """What an evaluation finds, and whether that is the best so far."""
        trainer: Any = self._trainer
        with _apart(trainer):  # it steps a ReduceLROnPlateau, too
            metrics: Mapping[str, Any] = trainer._evaluate(None, None, skip_scheduler=step == 0)
        is_new_best = bool(step) and trainer._determine_best_metric(metrics, None)
        data = trainer.eval_dataset
        prefixes = [f"eval_{name}" for name in data] if isinstance(data, dict) else ["eval"]
        added = {f"{prefix}_{name}" for prefix in prefixes for name in _TIMINGS} | {"epoch"}
        return {k: v for k, v in metrics.items() if k not in added}, is_new_best


@contextmanager
def _apart(trainer: Any) -> Iterator[None]:
    """Inside, the Trainer is in its training loop, and alone: accelerate keeps one note of which
    loader is at its end for the whole process, by which metrics of the last batch are cut."""
    accelerator, own_loader = trainer.accelerator, trainer.get_eval_dataloader
    shared, was_in_train = accelerator.gradient_state, trainer.is_in_train
    kept = {k: v for k, v in vars(trainer).items() if k == "get_eval_dataloader"}  # a user's
    alone = object.__new__(type(shared))
    alone.__dict__ = {**vars(shared), "active_dataloader": None, "dataloader_references": [None]}

    def loader(*args: Any, **options: Any) -> Any:
        found = own_loader(*args, **options)
        if hasattr(found, "gradient_state"):
            found.gradient_state = alone
        return found

    accelerator.gradient_state, trainer.is_in_train = alone, True
    trainer.get_eval_dataloader = loader
    try:
        yield
    finally:
        accelerator.gradient_state, trainer.is_in_train = shared, was_in_train
        del trainer.get_eval_dataloader
        vars(trainer).update(kept)


def check_evaluation(
    trainer: Any, options: Mapping[str, Any], require: Callable[[object, str, str], None]
) -> None:
    """Raises, by `require`, for what evaluations of the job would do otherwise than the loop's."""
    for option in sorted({"evaluate", "evaluate_every"} & set(options)):
        require(False, f"{option}={options[option]!r}", "eval_strategy of the Trainer says it")
    args = trainer.args
    remedy = "evaluate when it has trained (trainer.evaluate()), with eval_strategy='no'"
    require(trainer.eval_dataset is not None, "eval_strategy without eval_dataset", "give it one")
    require(not args.bf16, "bf16=True with an eval_strategy", remedy)
    workers = args.dataloader_num_workers > 0 and args.dataloader_persistent_workers
    require(not workers, "dataloader_persistent_workers=True with an eval_strategy", remedy)


def check_early_stopping(
    trainer: Any, callback: Any, require: Callable[[object, str, str], None]
) -> None:
    """Raises, by `require`, for early stopping that the Trainer's loop would not do either."""
    what, patience = "EarlyStoppingCallback", callback.early_stopping_patience
    require(evaluates(trainer), f"{what} without an eval_strategy", "set eval_strategy")
    remedy = "name the metric that it follows, such as 'eval_loss'"
    require(trainer.args.metric_for_best_model, f"{what} without metric_for_best_model", remedy)
    require(patience >= 1, f"{what}({patience})", "let its patience be 1 or more")


def evaluates(trainer: Any) -> bool:
    """Whether the Trainer's loop evaluates."""
    return str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) != "no"


def follows_evaluations(trainer: Any) -> bool:
    """Whether its schedule is stepped by evaluations, not by updates."""
    kind = str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))
    if trainer.lr_scheduler is None:
        return kind == "reduce_lr_on_plateau"
    return isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def check_schedule(trainer: Any, require: Callable[[object, str, str], None]) -> None:
    """Raises, by `require`, for a schedule that follows what the job does not know of."""
    args, given = trainer.args, trainer.lr_scheduler
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    greedy = kind == "greedy" if given is None else type(given).__name__ == "GreedyLR"
    require(not greedy, "lr_scheduler_type='greedy'", "take another schedule")
    if follows_evaluations(trainer):
        what = "ReduceLROnPlateau"
        require(evaluates(trainer), f"{what} without an eval_strategy", "set eval_strategy")
        named = args.metric_for_best_model
        require(named, f"{what} without metric_for_best_model", "name the metric that it follows")
