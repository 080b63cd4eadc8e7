"""Between two steps: what a job's `evaluate` is given, when, and what its answer means.

An evaluation looks at a job and changes nothing of it, whoever runs it, so a job trains to the same
numbers with one and without.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.job.job import STOP, Job

#: The name of a number that `evaluate` gives none.
UNNAMED = "value"


class Evaluated(NamedTuple):
    """What an evaluation has come to: numbers, None where there are none, and whether to stop."""

    values: dict[str, float] | None
    stops: bool


class HostEvaluation:
    """An `evaluate` that is a host's own, whose loop goes on with the random streams from where
    that has left them: they are not put back. The same wherever a job runs, as nothing of its data
    is fetched ahead of an evaluation.

    Attributes:
        at_start: whether there is one before the first step, too.
    """

    def __init__(self, function: Callable[[nn.Module], Any], at_start: bool = False) -> None:
        """Args beyond the attributes: function: what is asked."""
        self._function = function
        self.at_start = at_start

    def __call__(self, model: nn.Module) -> Any:
        """What the host finds."""
        return self._function(model)


def leaves_streams_alone(job: Job) -> bool:
    """Whether the job's evaluations put its random streams back."""
    return not isinstance(job.evaluate, HostEvaluation)


class EvaluationTimes:
    """After which steps a job is evaluated, as far as its data tell."""

    def __init__(self, job: Job) -> None:
        """Args: job: its data's length is that of every epoch."""
        self._every = None if job.evaluate is None else job.evaluate_every
        self.epoch_length = job.length or None
        self._period = self._every if isinstance(self._every, int) else None  # in steps
        if self._every == "epoch":
            self._period = self.epoch_length
        self._at_start = isinstance(job.evaluate, HostEvaluation) and job.evaluate.at_start

    def ends_epoch(self, steps: int) -> bool | None:
        """Whether the step that makes it `steps` is the last of its epoch; None: unknown."""
        return None if self.epoch_length is None else steps % self.epoch_length == 0

    def is_due(self, steps: int) -> bool:
        """Whether an evaluation follows that step; 0: comes before the first."""
        return self.before_due(steps, 1) == 0

    def before_due(self, steps: int, most: int) -> int:
        """How many more steps there may be, `most` at most, before an evaluation is due."""
        if steps < 1 and self._at_start:
            return 0
        if self._period is None:
            return most
        return min(most, -steps % self._period if steps else self._period)

    @property
    def at_found_ends(self) -> bool:
        """Whether it comes where data without a length are found to have ended: after `on_step`."""
        return self._every == "epoch" and self.epoch_length is None


def evaluate(job: Job) -> Evaluated:
    """Asks the job's `evaluate`, in the calling thread; puts back all but the random streams.

    Raises:
        JobError: its answer is none, or `evaluate` was taken away; names the job, the answer and
            what is one.
        Whatever it raises itself.
    """
    if job.evaluate is None:
        raise JobError(
            f"job {job.name!r}: its evaluate was set to None while it trains, and an evaluation is "
            "due; return None from it instead"
        )
    with _in_eval_mode(job.root), _without_gradients(job.root), torch.no_grad():
        answer = job.evaluate(job.model)
    return read_answer(job, answer)


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training  # not by train(), which would reach its children, too


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Those of the step before are there in some runs only, by how the step has run."""
    grads = [(p, p.grad) for p in model.parameters()]
    for parameter, grad in grads:
        if grad is not None:
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            if parameter.grad is not grad:
                parameter.grad = grad


@contextlib.contextmanager
def process_streams_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside from the process's random streams is drawn again afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def read_answer(job: Job, answer: Any) -> Evaluated:
    """What a job's `evaluate` has meant by its answer.

    Raises:
        JobError: it is none; names the job, the answer and what is one.
    """
    if answer is None or answer is STOP:
        return Evaluated(None, answer is STOP)
    stops = type(answer) is tuple and len(answer) == 2 and answer[1] is STOP
    given = answer[0] if stops else answer
    values = given if isinstance(given, Mapping) else {UNNAMED: given}
    try:
        return Evaluated({_name(n): _number(v) for n, v in values.items()}, stops)
    except (TypeError, ValueError, RuntimeError):
        raise JobError(
            f"job {job.name!r}: evaluate returned {answer!r}; it is to return a number, a dict of "
            "numbers by name, wf.STOP, a pair of numbers and wf.STOP, or None"
        ) from None


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError
    return name


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError
    return float(value)


def check_answer(job: Job, answer: Any) -> bool:
    """Whether what `on_step` returned is to end the job.

    Raises:
        JobError: it is neither None nor STOP.
    """
    if answer is not None and answer is not STOP:
        raise JobError(
            f"job {job.name!r}: on_step returned {answer!r}; it is to return None, or wf.STOP to "
            "end the job. Put the value somewhere, and return None"
        )
    return answer is STOP
