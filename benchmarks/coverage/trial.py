"""One trial: a job trained by the plain eager loop and by the engine, compared by bits.

Both start from a job made anew under the same seeds. What is compared is all that a user can see of
the training: the losses, the model's parameters and buffers, and the optimizer's state.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

import waterflow as wf

MEMORY = "2GiB"
_SEED = 1234
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REASON = 400  # characters of an error that are kept


class Kind(IntEnum):
    """What became of a trial, the better the lower."""

    SKIPPED = 0  # nothing to compare with: the eager loop itself fails
    CAPTURED = 1
    OPAQUE = 2  # trained as eager Python, or with an eager optimizer
    REFUSED = 3  # the eager loop trains it, the engine does not
    DIFFERENT = 4
    CRASHED = 5  # the process died, or gave no answer in time


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial and, unless it was captured, why."""

    kind: Kind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to train.

    Attributes:
        label: tells it from the other trials of its case.
        make: makes the job anew, with the same numbers where the random seeds are the same.
        pieces: smaller trials that together are this one. They are tried one by one where it is not
            captured, so that the outcome names the one that is to blame.
    """

    label: str
    make: Callable[[], wf.Job]
    pieces: tuple[Trial, ...] = ()


def outcome_of(trials: Sequence[Trial], audit: str) -> Outcome:
    """The worst outcome of the trials; skipped only where all are."""
    found = [_with_label(trial, _judge_to_the_piece(trial, audit)) for trial in trials]
    return max(found, key=lambda outcome: outcome.kind, default=Outcome(Kind.SKIPPED, "empty"))


def judge(trial: Trial, audit: str = "log") -> Outcome:
    """Trains the trial's job both ways and compares."""
    try:
        expected = _eager(trial)
    except Exception as error:
        return Outcome(Kind.SKIPPED, f"eager: {_text(error)}")
    try:
        job = _fresh(trial)
        report = wf.run([job], MEMORY, threads=1, audit=audit)[job.name]
    except Exception as error:
        return Outcome(Kind.REFUSED, f"run raised {_text(error)}")
    if not report.ok:
        return Outcome(Kind.REFUSED, f"{report.error_type}: {report.error}"[:_REASON])
    difference = _difference(expected, _Seen(job, report))
    if difference:
        if _difference(expected, _eager(trial)):
            return Outcome(Kind.SKIPPED, f"eager differs from itself: {difference}")
        return Outcome(Kind.DIFFERENT, f"{difference} [{report.captured}]")
    if report.captured == "captured":
        return Outcome(Kind.CAPTURED)
    return Outcome(Kind.OPAQUE, f"{report.captured}: {' '.join(report.notes)}"[:_REASON])


def _judge_to_the_piece(trial: Trial, audit: str) -> Outcome:
    whole = judge(trial, audit)
    if whole.kind is Kind.CAPTURED or not trial.pieces:
        return whole
    parts = outcome_of(trial.pieces, audit)
    return max(parts, whole, key=lambda outcome: outcome.kind)


def _with_label(trial: Trial, outcome: Outcome) -> Outcome:
    if not trial.label or outcome.kind is Kind.CAPTURED:
        return outcome
    return Outcome(outcome.kind, f"{trial.label}: {outcome.reason}")


class _Seen:
    """What can be seen of a job after its training."""

    def __init__(self, job: wf.Job, report: wf.JobReport) -> None:
        self.losses = list(report.losses)
        named = [*job.model.named_parameters(), *job.model.named_buffers()]
        state = _leaves(job.optimizer.state_dict()["state"], "optimizer")
        self.tensors = {name: value.detach() for name, value in (*named, *state)}


def _eager(trial: Trial) -> _Seen:
    job = _fresh(trial)
    return _Seen(job, wf.run_eager(job, threads=1))


def _fresh(trial: Trial) -> wf.Job:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    return trial.make()


def _difference(one: _Seen, other: _Seen) -> str:
    if len(one.losses) != len(other.losses):
        return f"{len(other.losses)} losses, not {len(one.losses)}"
    for step, (left, right) in enumerate(zip(one.losses, other.losses, strict=True), 1):
        if not _same_number(left, right):
            return f"the loss of step {step} is {right!r}, not {left!r}"
    if one.tensors.keys() != other.tensors.keys():
        return f"there are other tensors: {sorted(one.tensors.keys() ^ other.tensors.keys())}"
    wrong = [name for name, value in one.tensors.items() if not same(value, other.tensors[name])]
    return f"other values after training: {', '.join(wrong)}"[:_REASON] if wrong else ""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; one NaN is as good as another."""
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (one, other))
    bits = _BITS[one.element_size()]
    left, right = one.resolve_neg().view(bits), other.resolve_neg().view(bits)
    if torch.equal(left, right) or not one.is_floating_point():
        return torch.equal(left, right)
    return not ((left != right) & ~(torch.isnan(one) & torch.isnan(other))).any()


def _same_number(one: float, other: float) -> bool:
    return (one != one and other != other) or struct.pack("d", one) == struct.pack("d", other)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}.{index}")
    elif isinstance(value, (int, float)):
        yield name, torch.tensor(value)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_REASON]
