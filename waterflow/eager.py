"""The plain loop that every job's numbers are equal to: the reference for tests and comparisons."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from waterflow.batch import moved
from waterflow.job import STOP, Job, StepResult
from waterflow.jobreport import JobReport
from waterflow.optimizer_state import trained_parameters
from waterflow.partitioner.errors import NonFiniteLossError


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


def update_parameters(job: Job) -> None:
    """The optimizer's step on the gradients that are there, clipped where the job asks for it."""
    if job.clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained_parameters(job.optimizer), job.clip_grad_norm)
    job.optimizer.step()


def eager_step(job: Job, batch: Any) -> float:
    """One step of the plain loop, without the scheduler; returns the loss."""
    job.optimizer.zero_grad(set_to_none=True)
    loss = job.loss(job.model, batch)
    loss.backward()
    update_parameters(job)
    return float(loss.item())


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
    device = job.device
    epoch = 0
    while job.epochs is None or epoch < job.epochs:
        before = report.steps
        for batch in job.data:
            rates = learning_rates(job)
            loss = eager_step(job, moved(batch, device))
            report.losses.append(loss)
            report.steps += 1
            check_finite(job, report.steps, loss)
            if job.scheduler is not None and job.scheduler_every == "step":
                job.scheduler.step()
            result = StepResult(job.name, report.steps, epoch, loss, rates)
            if job.on_step is not None and job.on_step(result) is STOP:
                report.state = "stopped"
                return
            if job.steps is not None and report.steps >= job.steps:
                report.state = "finished"
                return
        if report.steps == before:
            raise ValueError(f"job {job.name!r}: its data yielded no batch in epoch {epoch}")
        if job.scheduler is not None and job.scheduler_every == "epoch":
            job.scheduler.step()
        epoch += 1
        report.epochs = epoch
    report.state = "finished"
