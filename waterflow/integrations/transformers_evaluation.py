"""The evaluations of a Trainer's training loop as those of a job."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import Trainer

#: What the Trainer adds beside the loss and the user's metrics: times, others in every run.
_TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class Evaluations:
    """Evaluates a Trainer's model where its training loop would, by ``trainer.evaluate()``.

    A job's evaluations leave its random streams alone. The Trainer's do not: a loader draws a seed
    whenever it is gone through. So the streams go on from where an evaluation has left them when
    the job's data are asked for the next batch (`go_on`), as in the loop.

    Attributes:
        every: after how many steps there may be one, as `Job.evaluate_every`.
    """

    def __init__(
        self, trainer: Trainer, updates: int, in_epoch: int, made: Callable[[], int]
    ) -> None:
        """Takes the Trainer, its updates, those of an epoch, and how many it has made."""
        self._trainer = trainer
        self._last, self._in_epoch, self._made = updates, in_epoch, made
        args = trainer.args
        self._by_epochs = str(args.eval_strategy.value) == "epoch"
        wanted = args.eval_steps or 0
        steps = math.ceil(updates * wanted) if wanted < 1 else int(wanted)
        self._period = in_epoch if self._by_epochs else max(1, steps)
        self.every = math.gcd(self._period, updates)
        self._streams: tuple[Any, Any] | None = None  # before and after the latest evaluation

    def options(self) -> dict[str, Any]:
        """The arguments of `Job` for them."""
        return {"evaluate": self._evaluate, "evaluate_every": self.every}

    def go_on(self) -> None:
        """Before the data give a batch: the streams are where the loop would have them."""
        streams, self._streams = self._streams, None
        if streams is not None:
            _move_streams(*streams)

    def _is_due(self, step: int) -> bool:
        args = self._trainer.args
        since = step / self._in_epoch if self._by_epochs else step
        return (step % self._period == 0 or step == self._last) and args.eval_delay <= since

    def _evaluate(self, model: torch.nn.Module) -> dict[str, float] | None:
        step = self._made()
        if not self._is_due(step):
            return None
        trainer: Any = self._trainer
        before = _streams()
        state = trainer.state
        state.global_step, state.epoch = step, step / self._in_epoch
        with _apart(trainer):
            metrics: Mapping[str, Any] = trainer.evaluate()
        self._streams = before, _streams()
        data = trainer.eval_dataset
        prefixes = [f"eval_{name}" for name in data] if isinstance(data, dict) else ["eval"]
        added = {f"{prefix}_{name}" for prefix in prefixes for name in _TIMINGS} | {"epoch"}
        return {name: value for name, value in metrics.items() if name not in added}


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


def _streams() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _move_streams(before: Any, after: Any) -> None:
    """Moves each stream that an evaluation has moved, where it still is where that began."""
    now = _streams()
    if torch.equal(now[0], before[0]):
        torch.set_rng_state(after[0])
    if now[1] == before[1]:
        random.setstate(after[1])
    if all(map(np.array_equal, now[2], before[2])):
        np.random.set_state(after[2])


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
