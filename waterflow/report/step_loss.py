"""A step's loss with the metrics that its step has told: one number on its way to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NO_METRICS: Mapping[str, float] = {}


class StepLoss(float):
    """A step's loss, which knows the step's metrics. A step without any has a plain number.

    Attributes:
        metrics: the numbers that the step has told beside its loss, by name.
    """

    __slots__ = ("metrics",)
    metrics: Mapping[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float]) -> StepLoss:
        """The loss with these metrics."""
        self = super().__new__(cls, loss)
        self.metrics = metrics
        return self


def with_metrics(loss: float, names: Sequence[str], numbers: Sequence[float]) -> float:
    """A loss with the metrics of these names; as it is where there are none."""
    return StepLoss(loss, dict(zip(names, numbers, strict=True))) if names else loss


def metrics_of(loss: float) -> Mapping[str, float]:
    """The metrics of the step that a loss is of; none where it tells of none."""
    return loss.metrics if isinstance(loss, StepLoss) else _NO_METRICS
