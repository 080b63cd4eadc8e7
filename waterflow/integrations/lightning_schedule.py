"""When Lightning validates and ends epochs, as a job knows it: after which of its updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a training is behind an update.

    Attributes:
        epoch: from 0.
        batch: those done in it.
        total: those done in all.
        updates: those done in all.
        ends: whether the epoch ends here.
    """

    epoch: int
    batch: int
    total: int
    updates: int
    ends: bool


class Schedule:
    """``val_check_interval`` and ``check_val_every_n_epoch`` of a Trainer."""

    def __init__(
        self,
        trainer: Any,
        length: int | None,
        accumulated: int,
        validates: bool,
        require: Callable[..., None],
    ) -> None:
        """Args: a Trainer or None; the batches of an epoch, None: unknown; how many make an update;
        whether there is validation; raises for what a job could not do."""
        self._length, self._accumulated = length, accumulated
        timed = getattr(trainer, "_val_check_time_interval", None)
        require(timed is None, f"val_check_interval of {timed} s", "count batches")
        interval = 1.0 if trainer is None else trainer.val_check_interval
        self._epochs: int | None = 1 if trainer is None else trainer.check_val_every_n_epoch
        given = f"val_check_interval={interval!r}"
        #: Batches between two validations; None: the end of an epoch.
        self._batches: int | None = None
        if isinstance(interval, int):
            self._batches = interval
            within = self._epochs is None or length is None or interval <= length
            require(not validates or within, f"{given} of {length} batches", "let it be smaller")
        elif length is not None:
            self._batches = max(1, int(length * interval))
        else:
            require(interval == 1.0, f"{given} of a loader without length", "let it be an int")
        require(not validates or self._is_of_updates(), *self._between_updates(given))

    def _is_of_updates(self) -> bool:
        """Whether validation always comes behind an update, not between its batches."""
        period, accumulated, length = self._batches, self._accumulated, self._length
        if period is None or period == length or accumulated == 1:
            return True
        if self._epochs is None and length is not None:
            return period % length == 0 or period % accumulated == length % accumulated == 0
        return self._epochs is not None and period % accumulated == 0

    def _between_updates(self, given: str) -> tuple[str, str]:
        what = f"{given} with accumulate_grad_batches={self._accumulated}"
        return what, "validate after whole updates: let the interval be a multiple of them"

    @property
    def is_each_epochs_end(self) -> bool:
        """Whether that is all."""
        return self._epochs == 1 and self._batches in (None, self._length)

    def every(self, steps: int | None) -> int | str:
        """After which updates of a job of so many is to be asked, as `Job.evaluate_every`."""
        if self._length is None:
            return "epoch" if self._batches is None and steps is None else 1
        in_epoch = -(-self._length // self._accumulated)
        period = self._batches or self._length
        within = 0 if period % self._length == 0 else period // self._accumulated
        return math.gcd(in_epoch, within, steps or 0)

    def is_due(self, place: Place) -> bool:
        """Whether the module is validated there."""
        if self._epochs is not None and (place.epoch + 1) % self._epochs:
            return False
        if self._batches is None:
            return place.ends
        return (place.total if self._epochs is None else place.batch) % self._batches == 0
