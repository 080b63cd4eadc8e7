"""Spot checks: a captured step beside the user's own eager step, compared by bits.

At a checked step the graph computes on copies of the job's tensors and random streams, and the
eager step is the one that trains. So a graph is compared before it has changed anything, a
difference at its first use costs nothing but the graph, and the user's Python runs exactly as often
as in the loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from waterflow.account.purity import observer, undisturbed
from waterflow.executor.profile.measured import Scratch
from waterflow.job.batch import FlatBatch, moved
from waterflow.job.optimizer_state import moved_numbers, trained_parameters
from waterflow.job.training_step import eager_step, update_parameters
from waterflow.partitioner.graph.step_graph import Input
from waterflow.partitioner.profile import Profile
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import CheckedStep, PreparedStep, Specialization

#: Checks may take this share of the job's steps, or of so many steps where it has made fewer.
_CHECK_SHARE, _CHECK_STEPS = 0.01, 1000

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Prediction:
    """What a captured step makes of the present state, computed on copies.

    Attributes:
        loss: its loss.
        tensors: copies of the persistent tensors, after the step.
        made: the step's outputs: new state of the optimizer, or gradients, by their keys.
        stream: where the host's random stream stands afterwards.
    """

    loss: float
    tensors: dict[Input, torch.Tensor]
    made: dict[Any, torch.Tensor]
    stream: torch.Tensor


def check_step(
    steps: JobSteps,
    specialization: Specialization,
    step: PreparedStep,
    flat: FlatBatch,
    batch: Any,
    python: Callable[[Callable[[], float]], float],
    *,
    compare: bool = True,
) -> CheckedStep:
    """Makes one step of the job eagerly and compares it with the graph's.

    The eager step and the copies take ordinary memory, beside the budget.

    Args:
        steps: the job's.
        specialization: what is prepared for the batch.
        step: its captured form. It is left without tensors.
        flat: the batch, taken apart.
        batch: the batch as the data made it.
        python: runs the job's Python, with its random streams, in its caller's context.
        compare: False only observes the eager step.

    Raises:
        Whatever the eager step raises.
    """
    job = steps.job
    predicted: Prediction | None = None
    if compare:
        predicted = steps.device.profile(lambda: _predict(steps, step, flat))
    gradients: list[str | None] = []  # looked at as soon as they are all there

    observed = contextlib.ExitStack()

    def after_backward() -> None:
        if step.optimizer is not None:
            return
        observed.close()  # what the optimizer's own Python does, it does in every step
        if predicted is not None:
            gradients.append(_gradient_difference(job.optimizer, predicted))

    def eagerly() -> float:
        with torch.autograd.set_multithreading_enabled(False), observed:
            observed.enter_context(undisturbed(seen))
            return eager_step(job, given, after_backward)

    seen = observer()
    groups = [dict(group) for group in job.optimizer.param_groups]
    given = moved(batch, steps.device.tensors)
    try:
        loss = python(eagerly)
    except torch.OutOfMemoryError:
        if predicted is None or (step.optimizer is None and gradients):
            raise  # a step of the optimizer that was begun cannot be taken back
        _adopt(steps, step, predicted, python)
        return CheckedStep(predicted.loss, None, seen, adopted=True)
    steps.persistent.put_back_buffers(specialization)
    difference = None if step.optimizer is None else _moved_number(job.optimizer, groups)
    if predicted is None or difference is not None:
        return CheckedStep(loss, difference, seen)
    difference = gradients[0] if gradients else None
    if not same_number(loss, predicted.loss):
        difference = f"the loss ({predicted.loss!r} instead of {loss!r})"
    difference = difference or _state_difference(steps, step, predicted)
    return CheckedStep(loss, difference, seen)


def _moved_number(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> str | None:
    """A hyperparameter that the step itself has changed: a graph would not."""
    for group, former in zip(optimizer.param_groups, before, strict=False):
        moved = moved_numbers(former, group)
        if moved:
            return f"the hyperparameter {moved[0]!r}, which the step changes"
    return None


def _predict(steps: JobSteps, step: PreparedStep, flat: FlatBatch) -> Prediction:
    scratch = Scratch(steps.device)
    generators = steps.rng.copy().generators
    try:
        (twins,) = steps.binder.twins(scratch, [step])
        batch = scratch.batch(flat.tensors)
        scratch.bind(step.compiled, twins, batch, generators, steps.binder.registers(step))
        loss = scratch.run(step.compiled)
        tape = step.compiled.tape
        made = {key: tape.slot(slot) for key, slot in step.compiled.outputs.items()}
    finally:
        step.compiled.unbind()
        scratch.close()
    return Prediction(loss, twins, made, generators[0].get_state())


def _gradient_difference(optimizer: torch.optim.Optimizer, predicted: Prediction) -> str | None:
    for index, parameter in enumerate(trained_parameters(optimizer)):
        made = predicted.made.get(("gradient", index))
        if (made is None) != (parameter.grad is None):
            return f"the gradient of parameter {index} ({'one only' if made is None else 'none'})"
        if made is not None and parameter.grad is not None and not same_bits(made, parameter.grad):
            return f"the gradient of parameter {index}"
    return None


def _state_difference(steps: JobSteps, step: PreparedStep, predicted: Prediction) -> str | None:
    """Where tensors or random streams differ after the step; whoever writes, both must agree."""
    opaque_optimizer = step.optimizer is None
    trained = {id(parameter) for parameter in trained_parameters(steps.job.optimizer)}
    for meaning, tensor in steps.persistent.inputs_of(step).items():
        updated = opaque_optimizer and (meaning.kind == "state" or id(tensor) in trained)
        if not updated and not same_bits(tensor, predicted.tensors[meaning]):
            return f"{meaning.kind} {meaning.key!r}"
    if opaque_optimizer:
        return None
    if not torch.equal(predicted.stream, steps.rng.host.get_state()):
        return "the random stream"
    return _new_state_difference(steps, step, predicted)


def _new_state_difference(steps: JobSteps, step: PreparedStep, predicted: Prediction) -> str | None:
    state = steps.job.optimizer.state
    parameters = trained_parameters(steps.job.optimizer)
    for (index, key), made in predicted.made.items():
        entry = state.get(parameters[index], {}).get(key)
        if not isinstance(entry, torch.Tensor) or not same_bits(entry, made):
            return f"the optimizer's state {key!r} of parameter {index}"
    for (index, key), value in step.graph.plain_state.items():
        if state.get(parameters[index], {}).get(key) != value:
            return f"the optimizer's state {key!r} of parameter {index}"
    return None


def _adopt(
    steps: JobSteps,
    step: PreparedStep,
    predicted: Prediction,
    python: Callable[[Callable[[], float]], float],
) -> None:
    """Makes the graph's numbers the job's: the eager step ended where memory did."""
    job = steps.job
    with torch.no_grad():
        for meaning, tensor in steps.persistent.inputs_of(step).items():
            tensor.detach().copy_(predicted.tensors[meaning])
    steps.rng.host.set_state(predicted.stream)
    made = {key: tensor.detach().clone() for key, tensor in predicted.made.items()}
    if step.creates_state:
        steps.persistent.put_state(step, made)
    if step.optimizer is not None:
        return

    def update() -> float:
        for index, parameter in enumerate(trained_parameters(job.optimizer)):
            parameter.grad = made.get(("gradient", index))
        update_parameters(job.optimizer, job.clip_grad_norm)
        return predicted.loss

    python(update)


def same_number(left: float, right: float) -> bool:
    """Whether two losses are the same number; NaN is NaN."""
    return left == right or (left != left and right != right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, bit for bit; one NaN counts as another."""
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout != torch.strided:
        return torch.equal(left.detach().to_dense(), right.detach().to_dense())
    one, other = _plain(left), _plain(right)
    whole = _WHOLE[one.element_size()]
    if torch.equal(one.view(whole), other.view(whole)):
        return True
    if not one.is_floating_point():
        return False
    differ = one.view(whole) != other.view(whole)
    return not bool((differ & ~(one.isnan() & other.isnan())).any())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class CheckSchedule:
    """When a job's captured steps are checked, beside the first use of each graph.

    "log" means steps 1, 2, 4, 8, ...; where a check costs many steps, as it does where steps are
    hardly more than Python, a due one waits until all of them cost less than their share.
    """

    def __init__(self, audit: str) -> None:
        self._audit = audit
        self._due = 1  # from this step on
        self._seconds = 0.0  # that checks have taken beyond the steps in whose place they were
        self._last = 0.0
        self._step_seconds = 0.0  # what a captured step takes

    @property
    def compares(self) -> bool:
        """Whether checks compare numbers; with "off" a first use only looks at what is called."""
        return self._audit != "off"

    def is_due(self, step: int, profile: Profile) -> bool:
        """Whether the job's step of this number (1, 2, ...) is to be checked.

        Args:
            step: its number.
            profile: of its captured form.
        """
        if self._audit != "log" or step < self._due:
            return self._audit == "all"
        self._step_seconds = profile.seconds
        share = _CHECK_SHARE * max(step, _CHECK_STEPS) * self._step_seconds
        return self._seconds + self._last <= share

    @contextlib.contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Around the check of the step of this number."""
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self._last = max(0.0, taken - self._step_seconds)
            self._seconds += self._last
            self._due = 1 << step.bit_length()
