"""What a LightningModule logs while it is a job's model: by `self.log`, of each of its options."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from waterflow.common.errors import JobError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

#: Lightning's reductions over the batches of an epoch, by all that it knows them as.
_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "min", "max", "sum")},
    "avg": "mean",
    **{getattr(torch, name): name for name in ("mean", "min", "max", "sum")},
    **{getattr(builtins, name): name for name in ("min", "max", "sum")},
}


class Logged(NamedTuple):
    """A value that was logged, and the options by which it becomes a number.

    Attributes:
        value: a tensor, a number, or a metric of torchmetrics.
        on_step: whether each step's value was asked for; None: as where it is logged.
        on_epoch: whether the epoch's was.
        reduction: of an epoch's values: "mean", "min", "max" or "sum".
        batch_size: the weight in a mean; None: the batch's own.
    """

    value: Any
    on_step: bool | None
    on_epoch: bool | None
    reduction: str
    batch_size: int | None


@contextlib.contextmanager
def logging(module: LightningModule, job: str) -> Iterator[list[tuple[str, Logged]]]:
    """What the module logs meanwhile, in its order."""
    found: list[tuple[str, Logged]] = []

    # Every option by its name: one that a newer Lightning adds is an error, not left out.
    def log(
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        asked = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
        if asked not in _REDUCTIONS:
            remedy = "reduce by mean, min, max or sum, or log a metric of torchmetrics"
            raise _refused(job, name, f"reduce_fx={reduce_fx!r}", remedy)
        if on_step is False and on_epoch is False:
            remedy = "let one of them be True"
            raise _refused(job, name, "on_step=False, on_epoch=False", remedy)
        value = value.detach() if isinstance(value, torch.Tensor) else value
        options = Logged(value, on_step, on_epoch, _REDUCTIONS[asked], batch_size)
        found.append((name, options))

    own = vars(module)
    own["log"] = log
    try:
        yield found
    finally:
        del own["log"]


def of_step(job: str, logged: list[tuple[str, Logged]]) -> dict[str, Any]:
    """What a training step logged, as the metrics of a job: each step's own values."""
    for name, each in logged:
        if _is_metric(each.value):
            remedy = "log its value: of torchmetrics.functional, or computed in validation_step"
            raise _refused(job, name, "a metric of torchmetrics in training_step", remedy)
    return {name: each.value for name, each in logged}


def weights_of_step(job: str, logged: list[tuple[str, Logged]], batch: Any) -> dict[str, int]:
    """What a training step's values weigh in the means of their epoch, as metrics beside them,
    where such means are asked for."""
    averaged = [(name, each) for name, each in logged if each.on_epoch and each.reduction == "mean"]
    own = {f"{name}_batch_size": each.batch_size for name, each in averaged if each.batch_size}
    if len(own) == len(averaged):
        return own
    size = _first_size(batch)
    if size is None:
        remedy = "say batch_size="
        raise _refused(job, averaged[0][0], "on_epoch=True of a batch without a tensor", remedy)
    return {"batch_size": size, **own}


def _first_size(batch: Any) -> int | None:
    """The first dimension of a batch's first tensor, as Lightning looks for it."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else 1
    if dataclasses.is_dataclass(batch):
        batch = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, str) or not isinstance(batch, Iterable):
        return None
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((size for item in items if (size := _first_size(item)) is not None), None)


class Epoch:
    """What the batches of a validation log, each name reduced as it was asked to be."""

    def __init__(self, job: str) -> None:
        """Args: the job's name."""
        self._job = job
        self._reduced: dict[str, _Reduced] = {}

    def add(self, logged: list[tuple[str, Logged]], batch_size: Callable[[], int]) -> None:
        """Takes in what one hook logged; the batch's size is asked for where it is needed."""
        for name, each in logged:
            if each.on_epoch is False:
                remedy = "leave on_epoch out: a validation has one number"
                raise _refused(self._job, name, "on_epoch=False in validation", remedy)
            reduced = self._reduced.setdefault(name, _Reduced(each))
            weight = 1
            if each.reduction == "mean" and not _is_metric(each.value):
                weight = batch_size() if each.batch_size is None else each.batch_size
            reduced.add(each.value, weight)

    def values(self) -> dict[str, torch.Tensor]:
        """Of all batches; what was asked for by steps, too, has the host's second name. Metrics
        begin anew."""
        found: dict[str, torch.Tensor] = {}
        for name, reduced in self._reduced.items():
            found[name] = reduced.value()
            if reduced.on_step:
                found[f"{name}_epoch"] = found[name]
        return found


class _Reduced:
    """The values of one name: those of an epoch as one."""

    def __init__(self, first: Logged) -> None:
        self.on_step = bool(first.on_step)
        self._reduction = first.reduction
        start = {"min": float("inf"), "max": -float("inf")}.get(first.reduction, 0.0)
        self._value = torch.tensor(start)
        self._weight = 0
        self._metric: Any = None

    def add(self, value: Any, weight: int) -> None:
        """Takes in a batch's; in at least the default type, as Lightning does."""
        if _is_metric(value):
            self._metric = value
            return
        value = torch.as_tensor(value).detach().cpu().squeeze()
        if value.dtype not in (torch.float32, torch.float64):
            value = value.to(torch.get_default_dtype())
        if self._reduction == "mean":
            self._value = self._value + value * weight
            self._weight += weight
        elif self._reduction == "sum":
            self._value = self._value + value
        else:
            self._value = getattr(torch, self._reduction)(self._value, value)

    def value(self) -> torch.Tensor:
        """Of all."""
        if self._metric is not None:
            computed = torch.as_tensor(self._metric.compute())
            self._metric.reset()
            return computed
        return self._value / self._weight if self._reduction == "mean" else self._value


def _is_metric(value: Any) -> bool:
    """Whether it is a metric of torchmetrics."""
    return hasattr(value, "compute") and hasattr(value, "reset")


def _refused(job: str, name: str, what: str, remedy: str) -> JobError:
    return JobError(f"job {job!r}: self.log({name!r}) with {what} is not taken over: {remedy}")
