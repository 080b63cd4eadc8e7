"""What a user's function tells of a step: its loss, and metrics beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from waterflow.common.errors import JobError
from waterflow.report.step_loss import with_metrics

#: What a metric may be: a tensor with one element, or a number.
Scalar = torch.Tensor | float


# No data classes: whatever code runs within a step has to be this package's own, and theirs is
# generated.


class Outcome:
    """What a user's function has returned.

    Attributes:
        loss: as the function gave it.
        metrics: beside it, by name.
    """

    def __init__(self, loss: Any, metrics: Mapping[str, Scalar]) -> None:
        self.loss = loss
        self.metrics = metrics

    @classmethod
    def of(cls, job: str, returned: Any, function: str = "loss") -> Outcome:
        """Takes apart what a job's ``loss`` or ``step`` has returned.

        Args:
            job: its name.
            returned: a loss, or a tuple of the loss and a dict of metrics.
            function: which of the two has returned it.

        Raises:
            JobError: it is a tuple of something else.
        """
        if not isinstance(returned, tuple):
            return cls(returned, {})
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise JobError(
                f"job {job!r}: its {function} returned a tuple of {len(returned)} values; return "
                'the loss, or (loss, {"name": number, ...})'
            )
        for name, value in returned[1].items():
            _check_metric(job, name, value)
        return cls(*returned)

    def detached_metrics(self) -> dict[str, Scalar]:
        """The metrics without what they were computed from."""
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in self.metrics.items()
        }


def _check_metric(job: str, name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise JobError(f"job {job!r}: a metric's name must be a text, got {name!r}")
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return
        got = f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    elif isinstance(value, (int, float)):
        return
    else:
        got = f"a {type(value).__name__}"
    raise JobError(
        f"job {job!r}: the metric {name!r} must be a number or a tensor with one element, got "
        f"{got}; give its mean(), or leave it out"
    )


class StepTensors:
    """What a step's passes have computed, still where the device keeps it.

    Attributes:
        loss: the step's loss.
        metrics: of each of its batches.
    """

    def __init__(self, loss: Any, metrics: Sequence[Mapping[str, Scalar]]) -> None:
        self.loss = loss
        self.metrics = metrics

    @property
    def names(self) -> list[str]:
        """The names of its metrics."""
        return list(dict.fromkeys(name for told in self.metrics for name in told))

    def readings(self) -> torch.Tensor:
        """The loss, and behind it the metrics in the order of their names, as one float64 tensor:
        read at once. A metric is its mean over the batches that tell it."""
        found = [self._as_double(self.loss)]
        for name in self.names:
            values = [self._as_double(told[name]) for told in self.metrics if name in told]
            total = sum(values[1:], start=values[0])
            found.append(total if len(values) == 1 else total / len(values))
        return torch.stack(found)

    def _as_double(self, value: Scalar) -> torch.Tensor:
        device = self.loss.device if isinstance(self.loss, torch.Tensor) else None
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()).to(device, torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=device)

    def read(self) -> float:
        """The loss as a number, with the metrics. Waits for the device."""
        if not any(self.metrics):
            return float(self.loss.item() if isinstance(self.loss, torch.Tensor) else self.loss)
        loss, *numbers = self.readings().tolist()
        return with_metrics(loss, self.names, numbers)
