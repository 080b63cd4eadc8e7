"""What is to be planned, as users name it: zoo models, factories in files, factories, jobs."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from waterflow.capture.optimizer_cache import OptimizerTraces
from waterflow.common.errors import JobError
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.job.job import Job
from waterflow.job.job_file import load_job_file, load_job_function
from waterflow.models.zoo import TASKS
from waterflow.steps.job_steps import JobSteps
from waterflow.study.batch_scaling import FootprintModel, footprint_model
from waterflow.study.estimate import SizedJob
from waterflow.study.footprint import Footprint, footprint_of, job_of
from waterflow.study.hardware import Hardware

JobFactory = Callable[[int], Job]
"""Makes a job for a batch size."""

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
    ) -> None:
        """Args beyond the obvious.

        source: footprints by batch size, or the one of a job as it is.
        batch: the batch size asked for, None if it is open.
        weight: that of the job, beside others.
        """
        self.name = name
        self.batch = batch
        self._source = source
        self._hardware = hardware
        self._weight = weight
        self._subjects: dict[int | None, SizedJob] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether it is a job as it is, whose batch cannot be chosen."""
        return isinstance(self._source, Footprint)

    def sized_job(self, batch: int | None = None) -> SizedJob:
        """The job at a batch size, with estimated times where none were measured."""
        if batch not in self._subjects:
            source = self._source
            footprint = source if isinstance(source, Footprint) else source.at(batch or 1)
            self._subjects[batch] = SizedJob(
                self._timed(footprint), self._hardware.alignment, self._weight
            )
        return self._subjects[batch]

    def _timed(self, footprint: Footprint) -> Footprint:
        if footprint.steady.seconds > 0:
            return dataclasses.replace(footprint, name=self.name)
        seconds = self._hardware.seconds(footprint.flops, footprint.moved_bytes)
        steady = dataclasses.replace(footprint.steady, node_seconds=seconds)
        return dataclasses.replace(footprint, name=self.name, steady=steady)


def candidates_of(
    jobs: Sequence[str | Job | JobFactory], hardware: Hardware, measure: bool = False
) -> list[StudyJob]:
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
    if not jobs:
        raise JobError("there is nothing to plan: name at least one job")
    found: list[StudyJob] = []
    families: dict[object, FootprintModel] = {}
    traces = OptimizerTraces()
    for what in jobs:
        if isinstance(what, str):
            found += _named(what, hardware, families, measure, traces)
        elif isinstance(what, Job):
            found.append(_fixed(what, hardware, measure, traces))
        elif callable(what):
            name = getattr(what, "__name__", type(what).__name__)
            found.append(StudyJob(name, _footprint_model(what, name, hardware, families), hardware))
        else:
            raise JobError(f"cannot plan {what!r}: give a model's name, a factory or a wf.Job")
    _number(found)
    return found


def _named(
    text: str,
    hardware: Hardware,
    families: dict[object, FootprintModel],
    measure: bool,
    traces: OptimizerTraces,
) -> list[StudyJob]:
    match = _SPEC.fullmatch(text)
    assert match is not None
    what, asked = match["what"], match["batch"]
    if asked is not None and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise JobError(f"{text!r}: the batch must be a whole number above 0, like {what}:batch=32")
    batch = None if asked is None else int(asked)
    if what in TASKS:
        task = TASKS[what]
        make: JobFactory = lambda size: job_of(task, size)  # noqa: E731
        return [StudyJob(what, _footprint_model(make, what, hardware, families), hardware, batch)]
    path, _, function = what.partition(".py:")
    if function:
        make = load_job_function(Path(path + ".py"), function)
        return [
            StudyJob(function, _footprint_model(make, what, hardware, families), hardware, batch)
        ]
    if what.endswith(".py"):
        if batch is not None:
            raise JobError(f"{text!r}: name a factory, like {what}:make_job:batch={batch}")
        jobs = load_job_file(what).make_jobs()
        return [_fixed(job, hardware, measure, traces) for job in jobs]
    near = difflib.get_close_matches(what, TASKS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(TASKS)}."
    raise JobError(f"there is no model {what!r}; {hint} A factory of yours is models.py:make_job")


def _footprint_model(
    make: JobFactory, name: str, hardware: Hardware, families: dict[object, FootprintModel]
) -> FootprintModel:
    """One family for equal names: they are captured once."""
    key = (name, id(make) if name not in TASKS else None)
    if key not in families:
        families[key] = footprint_model(make, name=name, alignment=hardware.alignment)
    return families[key]


def _fixed(job: Job, hardware: Hardware, measure: bool, traces: OptimizerTraces) -> StudyJob:
    footprint = footprint_of(job, alignment=hardware.alignment, traces=traces)
    if measure:
        footprint = _measured(job, footprint, traces)
    return StudyJob(job.name, footprint, hardware, weight=job.weight)


def _measured(job: Job, footprint: Footprint, traces: OptimizerTraces) -> Footprint:
    """The footprint with profiles taken on the host, of steps on copies; the job stays as it is."""
    rng = JobRng(torch.initial_seed())
    threads = torch.get_num_threads()
    steps = JobSteps(job, HostDevice(), rng, threads, traces=traces, may_try=False)
    found = steps.preparer.prepare(next(iter(job.data))).specialization
    if found is None or found.steady is None:
        notes = "; ".join(steps.opacity.notes)
        reason = steps.opacity.step or notes or "at first, to be observed"
        raise JobError(
            f"job {job.name!r}: its steps run as eager Python ({reason}), so its memory is known "
            "only by a run"
        )
    first = None if found.first is None else found.first.memory.profile
    return dataclasses.replace(
        footprint,
        first=first,
        steady=found.steady.memory.profile,
        persistent_bytes=steps.persistent.final_bytes,
    )


def _number(candidates: Sequence[StudyJob]) -> None:
    """Gives candidates of one name a number each: "resnet50-1", "resnet50-2"."""
    names = [candidate.name for candidate in candidates]
    for place, candidate in enumerate(candidates):
        if names.count(names[place]) > 1:
            candidate.name = f"{names[place]}-{names[: place + 1].count(names[place])}"
