"""Ways in which Python may change what a step computes: how such a case is made and looked at.

A case makes the same job as often as it is asked to, each time from nothing. Asked for one that is
not `live`, it makes the job as a graph taken once would train it: without the change, or with what
the step reads frozen. So the test can show that the change matters, and a case that has lost its
point fails.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

#: What may become of a job: its graph stays, is taken anew, the whole step or its optimizer runs as
#: Python, the job is refused because it insists on a graph, or it fails as the plain loop does.
OUTCOMES = ("captured", "recaptured", "opaque", "opaque optimizer", "refused", "fails")
#: What is usual for a change between two steps: numbers become inputs, or the graph is taken anew.
KEPT = ("captured", "recaptured")
#: And for one that only an optimizer which runs as Python can follow.
EAGER = ("captured", "recaptured", "opaque optimizer")
STEPS = 10


@dataclass(frozen=True)
class Subject:
    """A job, and what must be equal besides its numbers: read when it has ended."""

    job: wf.Job
    extra: Callable[[], Any] = lambda: None


Make = Callable[[bool], wf.Job | Subject]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to change a step.

    Args:
        name: what it is called in the tests.
        make: makes the job; the argument says whether the change is live.
        expected: the outcomes that are right.
        around: the context in which the job is run.
        matters: whether the plain loop's numbers are others when the change is not live.
        repeats: whether the plain loop gives the same numbers twice; if not, only `extra` counts.
        alone: whether it changes what belongs to the process, so that no other job may run beside.
    """

    name: str
    make: Make
    expected: tuple[str, ...]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    matters: bool = True
    repeats: bool = True
    alone: bool = False

    def fresh(self, live: bool = True) -> Subject:
        """A new job, with every generator of the process where it always begins."""
        torch.manual_seed(1234)
        random.seed(0)
        np.random.seed(0)
        made = self.make(live)
        return made if isinstance(made, Subject) else Subject(made)


CASES: dict[str, Case] = {}


def case(*expected: str, **options: Any) -> Callable[[Make], Make]:
    """Enters a function that makes jobs into the table, under its own name."""
    assert set(expected) <= set(OUTCOMES), expected

    def enter(make: Make) -> Make:
        name = make.__name__.strip("_")
        assert name not in CASES, name
        CASES[name] = Case(name=name, make=make, expected=expected, **options)
        return make

    return enter


def batches(count: int = STEPS, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of 16 numbers with labels of four classes."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 16, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def made_by(make_batches):
    """Data whose batches are made anew in every epoch."""

    class Data:
        def __iter__(self):
            return make_batches()

    return Data()


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Linear, tanh, linear; with a dropout between where one is asked for."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), *drop, nn.Linear(32, 4))


class Net(nn.Module):
    """The same with names, and a factor that subclasses make of what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))) * self.factor(x)

    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)


def job(model: nn.Module, loss: Any = cross_entropy, **options: Any) -> wf.Job:
    """A job of at least ten steps under SGD with momentum, unless told otherwise."""
    if "optimizer" not in options:
        options["optimizer"] = sgd(model)
    if "data" not in options:
        options["data"] = batches()
    return wf.Job("case", model=model, loss=loss, **{"seed": 5, **options})


def at(step: int, live: bool, change: Callable[[], Any]) -> Callable[[wf.StepResult], None]:
    """A callback that makes a change after one step."""

    def on_step(result: wf.StepResult) -> None:
        if live and result.step == step:
            change()

    return on_step


def every(live: bool, change: Callable[[int], Any]) -> Callable[[wf.StepResult], None]:
    """A callback that makes a change after every step; it is given the step's number."""

    def on_step(result: wf.StepResult) -> None:
        if live:
            change(result.step)

    return on_step


def filler(steps: int) -> wf.Job:
    """The job beside: it draws random numbers, so that whoever touches its stream is seen."""
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 4))
    options: dict[str, Any] = {"data": batches(2), "steps": max(steps, STEPS), "seed": 9}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return wf.Job("filler", model=model, optimizer=optimizer, loss=cross_entropy, **options)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each operator, so that sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(value: Any) -> Any:
    """A value as something that is equal only where every bit is."""
    if isinstance(value, torch.Tensor):
        return _tensor_bits(value)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, Mapping):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [bits(entry) for entry in value]
    return value


def _tensor_bits(value: torch.Tensor) -> Any:
    value = value.detach()
    if value.is_nested:
        return [_tensor_bits(part) for part in value.unbind()]
    layout = str(value.layout)
    if value.layout != torch.strided:
        value = value.to_dense()
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    return (str(value.dtype), tuple(value.shape), layout, raw)


def outcome_of(subject: Subject, report: wf.JobReport) -> dict[str, Any]:
    """All that training leaves behind, by name, as bits."""
    found = {f"loss of step {n}": bits(loss) for n, loss in enumerate(report.losses, 1)}
    found |= {
        f"weight {name}": bits(value) for name, value in subject.job.model.state_dict().items()
    }
    found |= {f"metric {name}": bits(values) for name, values in report.metrics.items()}
    for number, group in enumerate(subject.job.optimizer.param_groups):
        found |= {f"group {number} {key}": bits(v) for key, v in group.items() if key != "params"}
        for index, parameter in enumerate(group["params"]):
            state = subject.job.optimizer.state.get(parameter, {})
            found |= {f"state {number}.{index} {key}": bits(v) for key, v in state.items()}
    found["the end"] = (report.state, report.error_type)
    found["extra"] = bits(subject.extra())
    return found


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both."""
    missing = object()
    names = [*left, *(name for name in right if name not in left)]
    return [name for name in names if left.get(name, missing) != right.get(name, missing)]
