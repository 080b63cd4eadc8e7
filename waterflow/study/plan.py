"""Will these jobs fit, and how fast: `plan`. Nothing is trained for an answer.

Steps are captured with tensors that have shapes but no memory; the real allocator decides on
virtual addresses. See `estimate` for what is exact and what is simulated.
"""

from __future__ import annotations

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes
from waterflow.study.estimate import STUDIED, SizedJob, admitted, estimate
from waterflow.study.hardware import get_hardware
from waterflow.study.job_specs import JobSpecs, StudyJob, study_jobs
from waterflow.study.results import Plan, PlannedJob


def plan(
    jobs: JobSpecs,
    memory: int | str,
    *,
    hardware: str | None = None,
    lanes: int = 2,
    measure: bool = False,
) -> Plan:
    """Whether these jobs fit a budget together, and what each policy makes of them.

    Priorities and weights count as in a run: they say who is let in first where not all fit, and
    under the policy "flow" who gets how much of the lanes; other policies make one step of each job
    in turn. Not looked at are `memory_limit` and `spill` (what fits is told for steps as they are
    captured, though a run may spill opportunistic jobs rather than have somebody wait) and how far
    a run throttles jobs beside a guaranteed one: nobody knows before it how much they slow it down.

    Args:
        jobs: zoo models with a batch ("resnet50:batch=160"), factories in files with a batch
            ("models.py:make_job:batch=8"), files of jobs ("jobs.py"), or jobs (`wf.Job`).
        memory: bytes that all jobs together may hold, or a text such as "32GiB".
        hardware: "v100", "p100", "a100", "h100", "h200" or "cpu": its alignment counts, and its
            peak rates give estimated times. None: this machine's GPU, or its CPU.
        lanes: node groups that may run at once.
        measure: run each step of jobs that are given as jobs once or twice on copies, on the CPU:
            with hardware="cpu" memory is then that of a run on this machine, to the byte.

    Raises:
        JobError: a job cannot be had or planned; says which and why.
    """
    budget = parse_bytes(memory)
    device = get_hardware(hardware)
    found = study_jobs(jobs, device, measure)
    for job in found:
        if job.batch is None and not job.is_fixed:
            raise JobError(f"{job.name}: which batch? Write {job.name}:batch=32, or ask max_batch")
    sized = [job.sized_job(job.batch) for job in found]
    entering = admitted(sized, budget, device.alignment)
    first, waiting, refused = (tuple(found[n].name for n in places) for places in entering)
    return Plan(
        memory_bytes=budget,
        hardware=device.name,
        jobs=tuple(map(_planned, found, sized)),
        policies={
            policy: estimate(sized, budget, policy, device.alignment, lanes) for policy in STUDIED
        },
        first=first,
        waiting=waiting,
        refused=refused,
        subjects=tuple(sized),
    )


def _planned(job: StudyJob, sized_job: SizedJob) -> PlannedJob:
    return PlannedJob(
        name=job.name,
        batch=job.batch,
        persistent_bytes=sized_job.persistent_bytes,
        solo_bytes=sized_job.solo_bytes,
        source=sized_job.profile.source,
        priority=job.priority,
        weight=job.weight,
    )
