"""The plain loop that every job's numbers are equal to: the reference for tests and comparisons."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from waterflow.common.errors import NonFiniteLossError
from waterflow.job.batch import moved
from waterflow.job.batch_reads import reads_of
from waterflow.job.epochs import begin_epoch
from waterflow.job.evaluation import EvaluationTimes, check_answer, evaluate, process_streams_kept
from waterflow.job.job import Job, StepResult
from waterflow.job.optimizer_state import trained_parameters
from waterflow.report.evaluation import Evaluation
from waterflow.report.job_report import JobReport


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


def clip_gradients(optimizer: torch.optim.Optimizer, clip_grad_norm: float | None) -> None:
    """Clips the gradients of the optimizer's parameters, where a norm is given."""
    if clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained_parameters(optimizer), clip_grad_norm)


def update_parameters(optimizer: torch.optim.Optimizer, clip_grad_norm: float | None) -> None:
    """The optimizer's step on the gradients that are there, clipped where a norm is given."""
    clip_gradients(optimizer, clip_grad_norm)
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


def eager_step(job: Job, batch: Any, after_backward: Callable[[], None] = lambda: None) -> float:
    """One step of the plain loop, without the scheduler; returns the loss.

    Args:
        job: the job.
        batch: its batch, on its device.
        after_backward: called when the gradients are there, before they are clipped and used.
    """

    def evaluate() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss(job.model, batch)
        loss.backward()
        after_backward()
        return loss

    if needs_closure(job.optimizer):

        def closure() -> torch.Tensor:
            loss = evaluate()
            clip_gradients(job.optimizer, job.clip_grad_norm)
            return loss

        first: Any = job.optimizer.step(closure)  # type: ignore[arg-type]
        return float(first.detach() if isinstance(first, torch.Tensor) else first)
    loss = evaluate()
    update_parameters(job.optimizer, job.clip_grad_norm)
    return float(loss.item())


def step_scheduler(job: Job, every: str, loss: float) -> None:
    """Steps the job's scheduler where it is due ("step" or "epoch").

    One that follows a metric (``ReduceLROnPlateau``) is given the last step's loss.
    """
    if job.scheduler is None or job.scheduler_every != every:
        return
    if isinstance(job.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        job.scheduler.step(loss)
    else:
        job.scheduler.step()


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
    while job.epochs is None or epoch < job.epochs:
        before = report.steps
        for batch in begin_epoch(job.data, epoch):
            rates = learning_rates(job)
            loss = eager_step(job, moved(batch, device, reads_of(job.loss)))
            report.losses.append(loss)
            report.steps += 1
            check_finite(job, report.steps, loss)
            step_scheduler(job, "step", loss)
            stops = _after_step(job, report, times, (epoch, loss, rates))
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
        report.epochs = epoch
    report.state = "finished"


def _after_step(
    job: Job, report: JobReport, times: EvaluationTimes, step: tuple[int, float, tuple[float, ...]]
) -> bool:
    """Evaluates the job where that is due, and asks its callback; returns whether it is to stop."""
    stops, kept = False, len(report.evaluations)
    if times.is_due(report.steps):
        stops = _evaluate(job, report)
    if job.on_step is None:
        return stops
    values = next((found.values for found in report.evaluations[kept:]), None)
    ended = times.ends_epoch(report.steps)
    result = StepResult(job.name, report.steps, *step, job.model, ended, values)
    return check_answer(job, job.on_step(result)) or stops


def _evaluate(job: Job, report: JobReport) -> bool:
    """Evaluates the job and writes down what was found; returns whether it is to stop."""
    with process_streams_kept(job.device):
        found = evaluate(job)
    if found.values is not None:
        report.evaluations.append(Evaluation(report.steps, found.values))
    return found.stops
