"""What is to be planned, as users name it: zoo models, factories in files, factories, jobs."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from waterflow.capture.fake_job import flat_batch
from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.capture.tracing import is_of_job
from waterflow.common.errors import JobError
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.tape import compile_step
from waterflow.job.epochs import begin_epoch
from waterflow.job.job import Job
from waterflow.job.job_file import load_job_file, load_job_function
from waterflow.job.optimizer_state import Layout
from waterflow.models.task import Task
from waterflow.models.zoo import TASKS
from waterflow.partitioner.policies.fair_share import Priority
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import PreparedStep
from waterflow.steps.shared_captures import SharedCaptures
from waterflow.study.batch_scaling import FootprintModel, JobFactory, footprint_model
from waterflow.study.estimate import SizedJob
from waterflow.study.footprint import Footprint, footprint_of
from waterflow.study.graphs import capture_steps
from waterflow.study.hardware import Hardware

JobSpecs = Sequence[str | Job | JobFactory]
"""Jobs as users name them; see `study_jobs`."""

_SPEC = re.compile(r"(?P<what>.*?)(?::batch=(?P<batch>.*))?")


class StudyJob:
    """A job of any batch size, or of one."""

    def __init__(
        self,
        name: str,
        source: FootprintModel | Footprint,
        hardware: Hardware,
        batch: int | None = None,
        weight: float = 1.0,
        priority: str = "normal",
    ) -> None:
        """Args beyond the obvious.

        source: footprints by batch size, or the one of a job as it is.
        batch: the batch size asked for, None if it is open.
        weight, priority: those of the job, beside others.
        """
        self.name = name
        self.batch = batch
        self._source = source
        self._hardware = hardware
        self.weight = weight
        self.priority = priority
        self._sized: dict[int | None, SizedJob] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether it is a job as it is, whose batch cannot be chosen."""
        return isinstance(self._source, Footprint)

    def sized_job(self, batch: int | None = None) -> SizedJob:
        """The job at a batch size, with estimated times where none were measured."""
        if batch not in self._sized:
            source = self._source
            footprint = source if isinstance(source, Footprint) else source.at(batch or 1)
            self._sized[batch] = SizedJob(
                self._timed(footprint),
                self._hardware.alignment,
                self.weight,
                Priority[self.priority.upper()],
            )
        return self._sized[batch]

    def _timed(self, footprint: Footprint) -> Footprint:
        if footprint.steady.seconds > 0:
            return dataclasses.replace(footprint, name=self.name)
        seconds = self._hardware.seconds(footprint.flops, footprint.moved_bytes)
        steady = dataclasses.replace(footprint.steady, node_seconds=seconds)
        return dataclasses.replace(footprint, name=self.name, steady=steady)


def study_jobs(jobs: JobSpecs, hardware: Hardware, measure: bool = False) -> list[StudyJob]:
    """What users name, ready to plan; jobs of one name get numbers.

    Args:
        jobs: each a zoo model ("resnet50", "resnet50:batch=160"), a factory in a file
            ("models.py:make_job", also with a batch), a file whose `jobs()` returns jobs
            ("jobs.py"), a function from a batch size to a job, or a job.
        hardware: whose times and alignment to take.
        measure: run each step of jobs (not of models or factories) once or twice on copies, on
            this machine's CPU, for exact memory and times.

    Raises:
        JobError: one of them cannot be had; says which and why.
    """
    if isinstance(jobs, (str, Job)) or callable(jobs):
        one = f"job {jobs.name!r}" if isinstance(jobs, Job) else repr(jobs)
        raise JobError(f"jobs must be a list, got {one}: write [...] around it")
    if not jobs:
        raise JobError("there is nothing to plan: name at least one job")
    reader = _Reader(hardware, measure)
    found = [job for what in jobs for job in reader.read(what)]
    _number(found)
    return found


class _Reader:
    """Finds what users name; what is named twice is captured once."""

    def __init__(self, hardware: Hardware, measure: bool) -> None:
        self._hardware = hardware
        self._measure = measure
        self._models: dict[object, FootprintModel] = {}
        self._traces = OptimizerTraces()

    def read(self, what: str | Job | JobFactory) -> list[StudyJob]:
        """The jobs that one entry of a list stands for."""
        if isinstance(what, str):
            return self._read_text(what)
        if isinstance(what, Job):
            return [self._fixed(what)]
        if callable(what):
            name = getattr(what, "__name__", type(what).__name__)
            return [self._of_any_batch(name, what, name)]
        raise JobError(f"cannot plan {what!r}: give a model's name, a factory or a wf.Job")

    def _read_text(self, text: str) -> list[StudyJob]:
        match = _SPEC.fullmatch(text)
        assert match is not None
        what, batch = match["what"], _batch_of(text, match["what"], match["batch"])
        if what in TASKS:
            task = TASKS[what]
            return [self._of_any_batch(what, lambda size: job_of(task, size), what, batch)]
        path, _, function = what.partition(".py:")
        if function:
            make = load_job_function(Path(path + ".py"), function)
            return [self._of_any_batch(function, make, what, batch)]
        if what.endswith(".py"):
            if batch is not None:
                raise JobError(f"{text!r}: name a factory, like {what}:make_job:batch={batch}")
            return [self._fixed(job) for job in load_job_file(what).make_jobs()]
        near = difflib.get_close_matches(what, TASKS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(TASKS)}."
        raise JobError(
            f"there is no model {what!r}; {hint} A factory of yours is models.py:make_job"
        )

    def _of_any_batch(
        self, name: str, make: JobFactory, captured_as: str, batch: int | None = None
    ) -> StudyJob:
        key = (captured_as, id(make) if captured_as not in TASKS else None)
        if key not in self._models:
            alignment = self._hardware.alignment
            self._models[key] = footprint_model(make, name=captured_as, alignment=alignment)
        return StudyJob(name, self._models[key], self._hardware, batch)

    def _fixed(self, job: Job) -> StudyJob:
        footprint = footprint_of(job, alignment=self._hardware.alignment, traces=self._traces)
        if self._measure:
            footprint = _measured(job, footprint, self._traces)
        return StudyJob(
            job.name, footprint, self._hardware, weight=job.weight, priority=job.priority
        )


def job_of(task: Task, batch: int, name: str | None = None) -> Job:
    """A job that trains a task of the zoo for one step, on one batch of that many units.

    Args:
        task: what to train.
        batch: images, sequences, or what else the task counts.
        name: the job's name; the task's if None.
    """
    model = task.model()
    return Job(
        name or task.name,
        model=model,
        optimizer=task.optimizer(model.parameters()),
        loss=task.loss,
        data=[task.batch(batch)],
        steps=1,
    )


def _batch_of(text: str, what: str, asked: str | None) -> int | None:
    if asked is None:
        return None
    if not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise JobError(f"{text!r}: the batch must be a whole number above 0, like {what}:batch=32")
    return int(asked)


def _measured(job: Job, footprint: Footprint, traces: OptimizerTraces) -> Footprint:
    """The footprint with profiles taken on the host, of steps on copies; the job stays as it is."""
    rng = JobRng(torch.initial_seed())
    threads = torch.get_num_threads()
    captures = SharedCaptures(traces)
    steps = JobSteps(job, HostDevice(), rng, threads, captures=captures, may_try=False)
    batch = next(begin_epoch(job.data, 0, job.accumulate))
    first, steady = _settled(steps, batch) if job.step is not None else _prepared(steps, batch)
    return dataclasses.replace(
        footprint,
        first=None if first is None else first.memory.profile,
        steady=steady.memory.profile,
        persistent_bytes=steps.persistent.final_bytes,
    )


def _prepared(steps: JobSteps, batch: Any) -> tuple[PreparedStep | None, PreparedStep]:
    """The first step, if one creates state, and the later ones, profiled."""
    found = steps.preparer.prepare(batch).specialization
    if found is None or found.steady is None:
        reason = steps.opacity.step or "; ".join(steps.opacity.notes)
        raise JobError(
            f"job {steps.job.name!r}: its steps run as eager Python ({reason}), so its memory is "
            "known only by a run"
        )
    return found.first, found.steady


def _settled(steps: JobSteps, batch: Any) -> tuple[None, PreparedStep]:
    """The same of a step of the user's own: its later ones, on zeros for what its first, eager one
    would leave."""
    flat = flat_batch(steps.job, batch)
    graphs = capture_steps(steps.job, flat)
    steps.persistent.tensors = {
        meaning: Layout.of(tensor).make().zero_() if is_of_job(tensor) else tensor
        for meaning, tensor in graphs.held.items()
    }
    step = PreparedStep(graphs.steady, compile_step(graphs.steady), graphs.optimizer)
    steps.builder.profiler.profile([step], flat)
    steps.persistent.note_size([step])
    return None, step


def _number(jobs: Sequence[StudyJob]) -> None:
    """Gives jobs of one name a number each: "resnet50-1", "resnet50-2"."""
    names = [job.name for job in jobs]
    for place, job in enumerate(jobs):
        if names.count(names[place]) > 1:
            job.name = f"{names[place]}-{names[: place + 1].count(names[place])}"
