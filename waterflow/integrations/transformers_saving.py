"""The files of a Trainer whose best weights are asked for, written where its loop would."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from typing import Any

from torch import nn

from waterflow.integrations.transformers_data import Updates


class Saving:
    """Writes a Trainer's checkpoints by its own code, and loads the best when training ends."""

    def __init__(self, trainer: Any, updates: Updates) -> None:
        """Args beyond the obvious: updates: the Trainer's."""
        self._trainer, self._updates = trainer, updates
        args, state = trainer.args, trainer.state
        strategy = str(args.save_strategy.value)
        self._by_best = strategy == "best"
        #: Updates between two checkpoints; 0: other than by number, or none at all.
        self.period = 0
        if not keeps_best(trainer):
            return
        state.max_steps, state.num_train_epochs = updates.count, math.ceil(args.num_train_epochs)
        state.compute_steps(args, updates.count)
        state.train_batch_size = args.train_batch_size
        if strategy == "steps":
            self.period = int(state.save_steps)
        elif strategy == "epoch":
            self.period = updates.in_epoch

    def act(self, model: nn.Module, step: int, is_new_best: bool) -> None:
        """After a step, and its evaluation where there is one."""
        last = step == self._updates.count
        by_number = self.period > 0 and (step % self.period == 0 or last)
        if keeps_best(self._trainer) and (is_new_best if self._by_best else by_number):
            self._trainer._save_checkpoint(model, None)

    def end(self) -> None:
        """After the last step: the best weights are the model's."""
        trainer = self._trainer
        best = trainer.state.best_model_checkpoint
        if best is None or not trainer.args.load_best_model_at_end:
            return
        trainer._load_best_model()
        if trainer.args.save_total_limit != 1:
            return
        from transformers.trainer_utils import sort_checkpoints

        for folder in sort_checkpoints(trainer.args.output_dir, best_model_checkpoint=best):
            if not os.path.samefile(folder, best):
                shutil.rmtree(folder, ignore_errors=True)


def keeps_best(trainer: Any) -> bool:
    """Whether checkpoints are written for the best of them."""
    args = trainer.args
    return bool(args.load_best_model_at_end) or str(args.save_strategy.value) == "best"


def check_saving(
    trainer: Any, evaluates: bool, require: Callable[[object, str, str], None]
) -> None:
    """Raises, by `require`, for files that would not be those of the Trainer's loop."""
    if not keeps_best(trainer):
        return
    args = trainer.args
    what = "load_best_model_at_end=True" if args.load_best_model_at_end else "save_strategy='best'"
    require(evaluates, f"{what} without an eval_strategy", "set eval_strategy")
    require(
        args.save_only_model,
        f"{what} with save_only_model=False",
        "set save_only_model=True; run(checkpoint=...) keeps what a training goes on from",
    )
