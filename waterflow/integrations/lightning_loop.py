"""Lightning's training loop as a job's data and loss: batches, counts, what a step logs."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.integrations.lightning_logging import logging, of_step, weights_of_step
from waterflow.integrations.lightning_schedule import Place

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class State:
    """What a module finds as its trainer while it is a job's model: where its training is.

    Whatever else it asks a trainer for is an error: an answer made up would be another number.
    """

    current_epoch: int  # the next two where batches are counted alone: else asking is an error
    global_step: int

    def __init__(self, name: str, limits: Mapping[str, Any]) -> None:
        """Args: the job's name; its epochs, steps and accumulate."""
        epochs, steps = limits.get("epochs"), limits.get("steps")
        self.job = name
        self._batches: Callable[[], int] | None = None
        self._accumulated = limits.get("accumulate", 1)
        self.max_epochs = epochs
        self.max_steps = -1 if steps is None else steps
        self.current_epoch = self.global_step = 0
        self.world_size = 1
        self.global_rank = self.local_rank = self.node_rank = 0
        self.is_global_zero = True
        self.training = True
        self.sanity_checking = self.validating = self.testing = self.predicting = False
        self.fast_dev_run = False
        self.loggers: list[Any] = []
        self.logger = None

    def begin(self, batches: Callable[[], int], counts: bool) -> None:
        """The loaders are there.

        Args:
            batches: those of an epoch.
            counts: whether somebody counts them.
        """
        self._batches = batches
        if not counts:
            del self.current_epoch, self.global_step

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch."""
        if self._batches is None:
            raise JobError(
                f"job {self.job!r}: its module or data asks for the batches of an epoch before its "
                "loader is made: ask in configure_optimizers or later"
            )
        return self._batches()

    @property
    def estimated_stepping_batches(self) -> int:
        """Updates of the whole training."""
        in_epoch = -(-self.num_training_batches // self._accumulated)
        total = None if self.max_epochs is None else self.max_epochs * in_epoch
        if self.max_steps >= 0:
            return self.max_steps if total is None else min(total, self.max_steps)
        if total is None:
            raise JobError(f"job {self.job!r}: its length is not known: say epochs or steps")
        return total

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise JobError(
            f"job {self.job!r}: its module asks its trainer for {attribute!r}, which a job has "
            "not: leave that out, or train it with Lightning"
        )


def asks_where_it_is(module: nn.Module) -> bool:
    """Whether the module's own code may ask where its training is."""
    names = {"trainer", "_trainer", "current_epoch", "global_step"}
    own = (kind for kind in type(module).__mro__ if not _is_librarys(kind))
    functions = (value for kind in own for value in vars(kind).values())
    return any(names & _names_of(function) for function in functions)


def _is_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("builtins", "lightning", "torch", "abc")


def _names_of(function: Any) -> set[str]:
    """The names and texts in a function's code and the functions within."""
    function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
    found: set[str] = set()
    codes = [code] if (code := getattr(function, "__code__", None)) is not None else []
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                found.add(constant)
    return found


def length_of(loader: Any) -> int | None:
    """A loader's batches; None where nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # as of a DataLoader of an IterableDataset
        return None


def begun(loader: Any, limit: int | None = None) -> Iterator[Any]:
    """An epoch's batches, which begins now, drawn when Lightning draws them: of a loader without
    length one ahead, to know which is the last."""
    batches = iter(loader)
    if length_of(loader) is not None:
        return itertools.islice(batches, limit)
    return (batch for batch, _ in _with_ends(batches, next(batches, _NOTHING)))


_NOTHING = object()


def _with_ends(batches: Iterator[Any], batch: Any) -> Iterator[tuple[Any, bool]]:
    """Each batch, read one ahead, and whether it is the last; the first has been drawn."""
    while batch is not _NOTHING:
        following = next(batches, _NOTHING)
        yield batch, following is _NOTHING
        batch = following


class Counted:
    """A loader whose reader's module can ask for the epoch and the step."""

    def __init__(
        self, state: State, loader: Any, numbered: bool, accumulated: int, limit: int | None
    ) -> None:
        """Args: what is told; the loader; whether batches come with their numbers; how many make an
        update; how many there are in an epoch at most."""
        self.state = state
        self._loader = loader
        self._numbered = numbered
        self._accumulated = accumulated
        self._limit = limit
        self._epochs = 0
        self._steps = self._total = 0  # updates and batches of the epochs before
        self._batch, self._ends = 0, False  # drawn in this one; whether those are all

    @property
    def place(self) -> Place:
        """Where the training is behind the update of the batches that were drawn last."""
        updates = self._steps - (-self._batch // self._accumulated)
        total = self._total + self._batch
        return Place(self._epochs - 1, self._batch, total, updates, self._ends)

    def __len__(self) -> int:
        length = len(self._loader)
        return length if self._limit is None else min(length, self._limit)

    def __iter__(self) -> Iterator[Any]:
        before = self.place
        self._steps, self._total = before.updates, before.total
        self._batch, self._ends = 0, False
        self.state.current_epoch = self._epochs
        self._epochs += 1
        given = self._drawn()
        for batch in self._watched(given) if self._accumulated > 1 else given:
            number = self._batch
            self.state.global_step = self._steps + number // self._accumulated
            self._batch += 1
            yield (batch, number) if self._numbered else batch

    def _drawn(self) -> Iterator[Any]:
        """An epoch's batches; notes behind each whether it is the last."""
        length = None if length_of(self._loader) is None else len(self)
        if length is None:
            batches = iter(self._loader)
            for batch, is_last in _with_ends(batches, next(batches, _NOTHING)):
                self._ends = is_last
                yield batch
            return
        for number, batch in enumerate(begun(self._loader, self._limit)):
            self._ends = number + 1 == length
            yield batch

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Sees that steps do not draw between batches that draw: Lightning draws each of an
        update's batches behind the step before, a job all of them at first."""
        draws, before = False, torch.get_rng_state()
        for number, batch in enumerate(batches):
            after = torch.get_rng_state()
            draws = draws or (number > 0 and not torch.equal(before, after))
            yield batch
            before = torch.get_rng_state()
            if draws and not torch.equal(before, after):
                raise JobError(
                    "its data draw random numbers and so do its steps, which with "
                    "accumulate_grad_batches would be others than Lightning's: draw from a "
                    "generator of the data's own, or leave out accumulate_grad_batches"
                )

    def state_dict(self) -> dict[str, Any]:
        """Where the data are before an epoch, for checkpoints."""
        if getattr(self._loader, "persistent_workers", False):
            raise JobError(
                "its DataLoader has persistent_workers=True, whose random streams live in other "
                "processes and would be lost: make it without, to take checkpoints"
            )
        if length_of(self._loader) is None:
            raise JobError(
                "its loader has no length, so it is read one batch ahead, as Lightning does, which "
                "no checkpoint would find again: use data with a length, to take checkpoints"
            )
        own = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        place = self.place
        return {
            "epochs": self._epochs,
            "steps": place.updates,
            "total": place.total,
            "loader": own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on before an epoch, as a checkpoint knows it."""
        self._epochs = state["epochs"]
        self._steps, self._total = state["steps"], state["total"]
        self._batch, self._ends = 0, False
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


def loss_of(
    module: LightningModule, job: str, numbered: bool, names: set[str]
) -> Callable[[nn.Module, Any], tuple[torch.Tensor, dict[str, Any]]]:
    """`training_step`, and what it logs as metrics.

    Args:
        module: whose.
        job: its name.
        numbered: whether batches come with their numbers in the epoch.
        names: takes in those of what is logged.
    """
    count = len(inspect.signature(module.training_step).parameters)

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        batch, number = batch if numbered else (batch, 0)
        with logging(model, job) as noted:
            found = model.training_step(*(batch, number, 0)[:count])
        logged = of_step(job, noted)
        names.update(logged)
        value: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
        if value is None:
            raise JobError("training_step returned None: a job skips no step; return a loss")
        weights = weights_of_step(job, noted, batch)
        return value, {**weights, **logged}

    return loss


def reads_number(module: LightningModule) -> bool:
    """Whether `training_step` may read its batch's number: a value that changes at every step."""
    parameters = list(inspect.signature(module.training_step).parameters)
    return any(_reads(module.training_step, parameter) for parameter in parameters[1:2])


def _reads(function: Callable[..., Any], variable: str) -> bool:
    """Whether a function may read one of its variables."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or {"locals", "vars", "eval", "exec", "_getframe"} & set(code.co_names):
        return True
    instructions = dis.get_instructions(code)
    return variable in code.co_cellvars or any(
        variable == read or (isinstance(read, tuple) and variable in read)
        for read in (instruction.argval for instruction in instructions)
    )
