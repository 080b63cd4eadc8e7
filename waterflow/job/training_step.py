"""The plain loop that every job's numbers are equal to: the reference for tests and comparisons."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from waterflow.common.errors import JobError, NonFiniteLossError
from waterflow.job.batch import moved
from waterflow.job.epochs import MicroBatches, begin_epoch
from waterflow.job.evaluation import (
    EvaluationTimes,
    check_answer,
    evaluate,
    leaves_streams_alone,
    process_streams_kept,
)
from waterflow.job.job import Job, StepResult
from waterflow.job.optimizer_state import trained_parameters
from waterflow.job.outcome import Outcome, StepTensors
from waterflow.job.several import schedulers_in
from waterflow.report.evaluation import Evaluation
from waterflow.report.job_report import JobReport
from waterflow.report.step_loss import metrics_of


def learning_rates(job: Job) -> tuple[float, ...]:
    """The learning rates of the job's parameter groups now."""
    return tuple(float(group.get("lr", math.nan)) for group in job.optimizer.param_groups)


def check_finite(job: Job, step: int, loss: float) -> None:
    """Raises NonFiniteLossError where the job asked for it."""
    if job.stop_on_nan and not math.isfinite(loss):
        raise NonFiniteLossError(
            f"job {job.name!r}: the loss of step {step} is {loss}; it was asked to stop on that "
            "(stop_on_nan=True). Lower the learning rate or clip the gradients."
        )


def compute_gradients(
    job: Job,
    model: torch.nn.Module,
    batch: Any,
    before_backward: Callable[[Any], None] = lambda loss: None,
) -> StepTensors:
    """The forward and backward passes of a step: those of the plain loop, of eager steps, and what
    captured ones are traced from.

    Args:
        job: whose step.
        model: its model, or what stands for it in a trace.
        batch: the step's batch, or its `MicroBatches`.
        before_backward: called with the loss of each batch, as the user's function gave it.

    Raises:
        JobError: the loss returned something else than a loss and metrics.
    """
    rules, total, told = job.rules, None, []
    batches = batch if type(batch) is MicroBatches else (batch,)
    for part in batches:
        with rules.forward(lambda: job.device):
            outcome = Outcome.of(job.name, job.loss(model, part))
        check_loss(outcome.loss, job.loss)
        before_backward(outcome.loss)
        loss = rules.scaled(outcome.loss)
        loss.backward()
        told.append(outcome.detached_metrics())  # or n batches' activations might live on
        if len(batches) > 1:
            loss = loss.detach() if total is None else total + loss.detach()
        total = loss
    return StepTensors(total, told)


def clip_order(job: Job) -> list[int]:
    """In which order gradients are clipped, as positions among the optimizer's parameters.

    It is that of ``clip_grad_norm_(model.parameters(), ...)``, as a sum's last bits depend on it;
    parameters that are no module's come behind. Empty where nothing is clipped by its norm.
    """
    if job.rules.clip_grad_norm is None:
        return []
    positions = {id(p): index for index, p in enumerate(trained_parameters(job.optimizer))}
    listed = [positions.pop(id(p)) for p in job.root.parameters() if id(p) in positions]
    return listed + list(positions.values())


def clip_gradients(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Clips the gradients of the job's optimizer, or of what stands for it, where it says so."""
    if not job.rules.clips:
        return
    parameters = trained_parameters(optimizer)
    order = clip_order(job)
    job.rules.clip([parameters[index] for index in order] if order else parameters)


def update_parameters(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step on the gradients that are there, clipped where the job says so.

    Args:
        job: whose step.
        optimizer: its optimizer, or what stands for it in a trace.
    """
    clip_gradients(job, optimizer)
    optimizer.step()


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step evaluates the loss by itself, several times (LBFGS)."""
    return _demands_argument(type(optimizer).step)  # an object's may be wrapped by a scheduler


@functools.lru_cache(maxsize=256)
def _demands_argument(step: Callable[..., Any]) -> bool:
    try:
        _, *parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = parameters[0] if parameters else None
    return (
        first is not None and first.default is inspect.Parameter.empty and first.kind in positional
    )


def check_loss(loss: object, function: Callable[..., Any]) -> None:
    """Whether a loss can be trained on: where not, what torch says of it names no line.

    Raises:
        TypeError: it is no tensor of one element, or depends on nothing that is trained.
    """
    if not isinstance(loss, torch.Tensor):
        if hasattr(loss, "backward"):  # something of the user's that knows what to do
            return
        problem = f"must be a tensor with one element, got {loss!r}"
    elif loss.numel() != 1:
        problem = f"must be a tensor with one element, got a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem = (
            "does not depend on any parameter that requires a gradient: there is nothing to train "
            "(was it detached, or made under torch.no_grad()?)"
        )
    else:
        return
    raise TypeError(f"the loss {problem}{_where(function)}")


def _where(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno} in {code.co_name})"


def _zero_grad(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def eager_step(
    job: Job,
    batch: Any,
    after_backward: Callable[[], None] = lambda: None,
    zero_grad: Callable[[torch.optim.Optimizer], None] = _zero_grad,
) -> float:
    """One step of the plain loop, without the scheduler; returns the loss, with its metrics.

    Args:
        job: the job.
        batch: its batch, on its device.
        after_backward: called when the gradients are there, before they are clipped and used.
        zero_grad: does what ``optimizer.zero_grad()`` would.
    """
    if job.step is not None:
        return _own_step(job, batch)
    evaluate = functools.partial(_gradients_told, job, batch, after_backward, zero_grad)
    if needs_closure(job.optimizer):
        evaluations: list[StepTensors] = []
        first: Any = job.optimizer.step(
            functools.partial(_gradients_told_into, evaluations, evaluate, job)
        )
        loss = first.detach() if isinstance(first, torch.Tensor) else first
        return StepTensors(loss, evaluations[0].metrics if evaluations else ()).read()
    told = evaluate()
    update_parameters(job, job.optimizer)
    return told.read()


def _gradients_told(
    job: Job,
    batch: Any,
    after_backward: Callable[[], None],
    zero_grad: Callable[[torch.optim.Optimizer], None],
) -> StepTensors:
    zero_grad(job.optimizer)
    told = compute_gradients(job, job.model, batch)
    after_backward()
    return told


def _gradients_told_into(
    told: list[StepTensors], evaluate: Callable[[], StepTensors], job: Job
) -> Any:
    told.append(evaluate())
    clip_gradients(job, job.optimizer)
    return told[-1].loss


def _own_step(job: Job, batch: Any) -> float:
    """The user's own step."""
    assert job.step is not None
    outcome = Outcome.of(job.name, job.step(batch), "step")
    loss = outcome.loss
    one_number = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex()
    if not (one_number or isinstance(loss, (int, float))):
        got = f"a tensor of shape {tuple(loss.shape)}" if torch.is_tensor(loss) else repr(loss)
        raise JobError(
            f"job {job.name!r}: its step must return its loss, a number or a tensor with one "
            f'element, or (loss, {{"name": number, ...}}), got {got}'
        )
    return StepTensors(loss, [outcome.detached_metrics()]).read()


def step_scheduler(job: Job, every: str, loss: float) -> None:
    """Steps the job's schedulers where they are due ("step" or "epoch").

    Those that follow a metric (``ReduceLROnPlateau``) are given the last step's.

    Raises:
        JobError: that step has not told it.
    """
    if job.scheduler_every != every:
        return
    for scheduler in schedulers_in(job.scheduler):
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(_followed(job, loss))
        else:
            scheduler.step()


def _followed(job: Job, loss: float) -> float:
    """The number that the job's schedulers follow."""
    metrics, name = metrics_of(loss), job.scheduler_metric
    if name == "loss":
        return float(loss)
    if name not in metrics:
        told = ", ".join(map(repr, metrics)) or "none"
        raise JobError(
            f"job {job.name!r}: scheduler_metric={name!r} is no metric of its last step, which "
            f"told {told}: return (loss, {{{name!r}: ...}})"
        )
    return metrics[name]


def result_of(
    job: Job,
    step: tuple[int, int, float, tuple[float, ...]],
    ended: bool | None = None,
    evaluation: Mapping[str, float] | None = None,
) -> StepResult:
    """What the job's callback is told.

    Args:
        job: the job.
        step: how many steps have been made, the epoch, the loss, the learning rates.
        ended: whether that was the epoch's last step, if that is known.
        evaluation: what was found after it, where an evaluation was due.
    """
    steps, epoch, loss, rates = step
    told = dict(metrics_of(loss))
    return StepResult(
        *(job.name, steps, epoch, float(loss), rates, told, job.model, ended), evaluation=evaluation
    )


def run_eager(job: Job, threads: int | None = None) -> JobReport:
    """Trains the job by the plain loop, alone, in this thread and in ordinary memory.

    Args:
        job: the job; trained in place.
        threads: intra-op threads, as the lanes of a co-trained run have them; None: torch's count.

    Raises:
        Whatever the model, the data or the callback raises.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    seed = job.seed
    if seed is None:
        seed = draw_seed()
    report = JobReport(name=job.name, state="running", seed=seed, captured="eager")
    started = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=[] if job.device.type == "cpu" else [job.device]):
            torch.manual_seed(seed)
            _loop(job, report)
    finally:
        torch.set_num_threads(before)
    report.wall_seconds = time.perf_counter() - started
    return report


def draw_seed() -> int:
    """A seed from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _loop(job: Job, report: JobReport) -> None:
    device, times = job.device, EvaluationTimes(job)
    epoch = 0
    if times.is_due(0) and _evaluate(job, report):
        report.state = "stopped"
        return
    while job.epochs is None or epoch < job.epochs:
        before = report.steps
        for batch in begin_epoch(job.data, epoch, job.accumulate):
            rates = learning_rates(job)
            loss = eager_step(job, moved(batch, device, job.batch_reads))
            report.note_losses([loss])
            report.steps += 1
            check_finite(job, report.steps, loss)
            step_scheduler(job, "step", loss)
            stops = _after_step(job, report, times, epoch, loss, rates)
            if stops:
                report.state = "stopped"
                return
            if job.steps is not None and report.steps >= job.steps:
                report.state = "finished"
                return
        if report.steps == before:
            raise ValueError(f"job {job.name!r}: its data yielded no batch in epoch {epoch}")
        if times.at_found_ends and _evaluate(job, report):
            report.state = "stopped"
            return
        step_scheduler(job, "epoch", report.losses[-1])
        epoch += 1
        report.note_epoch(report.steps)
    report.state = "finished"


def _after_step(
    job: Job,
    report: JobReport,
    times: EvaluationTimes,
    epoch: int,
    loss: float,
    rates: tuple[float, ...],
) -> bool:
    """Evaluates the job where that is due, and asks its callback; returns whether it is to stop."""
    stops, kept = False, len(report.evaluations)
    if times.is_due(report.steps):
        stops = _evaluate(job, report)
    if job.on_step is None:
        return stops
    values = next((found.values for found in report.evaluations[kept:]), None)
    ended = times.ends_epoch(report.steps)
    result = result_of(job, (report.steps, epoch, loss, rates), ended, values)
    return check_answer(job, job.on_step(result)) or stops


def _evaluate(job: Job, report: JobReport) -> bool:
    """Evaluates the job and writes down what was found; returns whether it is to stop."""
    with process_streams_kept(job.device) if leaves_streams_alone(job) else nullcontext():
        found = evaluate(job)
    if found.values is not None:
        report.evaluations.append(Evaluation(report.steps, found.values))
    return found.stops
