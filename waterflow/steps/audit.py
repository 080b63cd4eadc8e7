"""Spot checks: a captured step beside the user's own eager step, compared by bits.

At a checked step the graph computes on copies of the job's tensors and random streams, and the
eager step is the one that trains. So a graph is compared before it has changed anything, a
difference at its first use costs nothing but the graph, and the user's Python runs exactly as often
as in the loop. What no loop repeats bit for bit is compared with some leeway (`leeway`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from waterflow.account.purity import observer, undisturbed
from waterflow.capture.tracing import reason_of
from waterflow.job.batch import FlatBatch, moved
from waterflow.job.optimizer_state import moved_numbers, trained_parameters
from waterflow.job.training_step import eager_step, update_parameters
from waterflow.partitioner.graph.variation import varying
from waterflow.report.step_loss import metrics_of
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.leeway import Leeway
from waterflow.steps.prediction import Prediction, predict
from waterflow.steps.prepared import CheckedStep, PreparedStep, Specialization


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
    predicted, broken = _predicted(steps, step, flat) if compare else (None, None)
    leeway = Leeway() if predicted is None else _leeway(steps, step, flat, predicted)
    groups = [dict(group) for group in job.optimizer.param_groups]
    batch = moved(batch, steps.device.tensors, job.batch_reads)
    eager = _EagerStep(steps, batch, step, predicted, leeway)
    try:
        with steps.persistent.gradients_lent():
            loss = python(eager.make)
    except torch.OutOfMemoryError:
        if predicted is None or eager.has_compared:
            raise  # a step of the optimizer that was begun cannot be taken back
        _adopt(steps, step, predicted, python)
        return CheckedStep(predicted.loss, None, eager.seen, adopted=True)
    steps.persistent.put_back_buffers(specialization)
    steps.opacity.prove()
    if broken is not None:
        return CheckedStep(loss, f"an error instead of a loss ({reason_of(broken)})", eager.seen)
    difference = None if step.optimizer is None else _moved_number(job.optimizer, groups)
    if predicted is not None and difference is None:
        difference = eager.gradient_difference
        difference = difference or _told_difference(loss, predicted.loss, leeway)
        difference = difference or _state_difference(steps, step, predicted, eager, leeway)
    return CheckedStep(loss, difference, eager.seen, varies=leeway.is_exceeded)


def _predicted(
    steps: JobSteps, step: PreparedStep, flat: FlatBatch
) -> tuple[Prediction | None, Exception | None]:
    """What the captured step makes of the present state, or what it raises: an error of the user's
    own, which the eager step then raises with its line."""
    try:
        return steps.device.profile(functools.partial(predict, steps, step, flat)), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return None, error


def _leeway(steps: JobSteps, step: PreparedStep, flat: FlatBatch, predicted: Prediction) -> Leeway:
    """What the step's numbers may differ by, from the same state."""
    variations = varying(step.graph)
    if not variations:
        return Leeway()
    again, broken = _predicted(steps, step, flat)
    return Leeway() if again is None or broken else Leeway.between(variations, predicted, again)


class _EagerStep:
    """The user's own step, observed as far as its graph goes.

    Attributes:
        seen: what has observed it.
        has_compared: whether gradients were compared, after which the optimizer's own step begins.
        gradient_difference: where they are not the graph's; None if they are, or were not compared.
        streams: where the host's random stream stands before it, and after it.
    """

    streams: tuple[torch.Tensor, torch.Tensor]

    def __init__(
        self,
        steps: JobSteps,
        batch: Any,
        step: PreparedStep,
        predicted: Prediction | None,
        leeway: Leeway,
    ) -> None:
        self._job = steps.job
        self._stream = steps.rng.host
        self._batch = batch
        self._step = step
        self._predicted = predicted
        self._leeway = leeway
        self._observed = contextlib.ExitStack()
        self.seen = observer()
        self.has_compared = False
        self.gradient_difference: str | None = None

    def make(self) -> float:
        before = self._stream.get_state()
        with torch.autograd.set_multithreading_enabled(False), self._observed:
            self._observed.enter_context(undisturbed(self.seen))
            loss = eager_step(self._job, self._batch, self._after_backward)
        self.streams = before, self._stream.get_state()
        return loss

    def _after_backward(self) -> None:
        if self._step.optimizer is not None:
            return
        self._observed.close()  # what the optimizer's own Python does, it does in every step
        if self._predicted is not None:  # compared as soon as they are all there
            self.gradient_difference = _gradient_difference(
                self._job.optimizer, self._predicted, self._leeway
            )
            self.has_compared = True


def _moved_number(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> str | None:
    """A hyperparameter that the step itself has changed: a graph would not."""
    for group, former in zip(optimizer.param_groups, before, strict=False):
        moved = moved_numbers(former, group)
        if moved:
            return f"the hyperparameter {moved[0]!r}, which the step changes"
    return None


def _told_difference(loss: float, predicted: float, leeway: Leeway) -> str | None:
    if not leeway.allows_number(float(loss), float(predicted)):
        return f"the loss ({float(predicted)!r} instead of {float(loss)!r})"
    eager, graph = metrics_of(loss), metrics_of(predicted)
    if eager.keys() != graph.keys():
        return f"its metrics ({', '.join(graph)} instead of {', '.join(eager)})"
    for name, number in eager.items():
        if not leeway.allows_number(number, graph[name]):
            return f"the metric {name!r} ({graph[name]!r} instead of {number!r})"
    return None


def _gradient_difference(
    optimizer: torch.optim.Optimizer, predicted: Prediction, leeway: Leeway
) -> str | None:
    for index, parameter in enumerate(trained_parameters(optimizer)):
        key = ("gradient", index)
        made, gradient = predicted.made.get(key), parameter.grad
        if (made is None) != (gradient is None):
            return f"the gradient of parameter {index} ({'one only' if made is None else 'none'})"
        if made is None or gradient is None:
            continue
        if not leeway.allows_output(key, gradient, made):
            return f"the gradient of parameter {index}"
    return None


def _state_difference(
    steps: JobSteps,
    step: PreparedStep,
    predicted: Prediction,
    eager: _EagerStep,
    leeway: Leeway,
) -> str | None:
    """Where tensors or random streams differ after the step; whoever writes, both must agree."""
    opaque_optimizer = step.optimizer is None
    trained = {id(parameter) for parameter in trained_parameters(steps.job.optimizer)}
    for meaning, tensor in steps.persistent.inputs_of(step).items():
        updated = opaque_optimizer and (meaning.kind == "state" or id(tensor) in trained)
        if updated or leeway.allows_input(meaning, tensor, predicted.tensors[meaning]):
            continue
        return f"{meaning.kind} {meaning.key!r}"
    if opaque_optimizer:
        return None
    if not predicted.draws_as(*eager.streams):
        return "the random stream"
    return _new_state_difference(steps, step, predicted, leeway)


def _new_state_difference(
    steps: JobSteps, step: PreparedStep, predicted: Prediction, leeway: Leeway
) -> str | None:
    state = steps.job.optimizer.state
    parameters = trained_parameters(steps.job.optimizer)
    for (index, key), made in predicted.made.items():
        entry = state.get(parameters[index], {}).get(key)
        is_tensor = isinstance(entry, torch.Tensor)
        if not is_tensor or not leeway.allows_output((index, key), entry, made):
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
    steps.persistent.put_back_gradients()
    with torch.no_grad():
        for meaning, tensor in steps.persistent.inputs_of(step).items():
            tensor.detach().copy_(predicted.tensors[meaning])
    if not torch.equal(*predicted.streams):
        steps.rng.host.set_state(predicted.streams[1])
    made = {key: tensor.detach().clone() for key, tensor in predicted.made.items()}
    if step.creates_state:
        steps.persistent.put_state(step, made)
    if step.optimizer is not None:
        return

    def update() -> float:
        for index, parameter in enumerate(trained_parameters(job.optimizer)):
            parameter.grad = made.get(("gradient", index))
        update_parameters(job, job.optimizer)
        return predicted.loss

    python(update)
