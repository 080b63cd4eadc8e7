"""Gives the jobs of a run what a folder of checkpoints has for them, or nothing to any of them."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.checkpoint.job_state import Progress, check, put
from waterflow.checkpoint.snapshot import JobSnapshot
from waterflow.checkpoint.store import CheckpointFolder
from waterflow.common.errors import CheckpointError
from waterflow.job.job import Job


def read_for(jobs: Sequence[Job], source: CheckpointFolder, partly: bool) -> dict[str, JobSnapshot]:
    """The checkpoints of these jobs, by name; none for jobs that had none yet. Changes nothing.

    Args:
        jobs: of a run, as their users have built them.
        source: of the run that they go on with.
        partly: whether the two may be of different jobs.

    Raises:
        CheckpointError: they are, and must not be, or a checkpoint cannot be used.
    """
    known = source.jobs()
    if not partly:
        _check_names(source, known, [job.name for job in jobs])
    found = {job.name: source.read(job.name) for job in jobs}
    there = {name: snapshot for name, snapshot in found.items() if snapshot is not None}
    for job in jobs:
        if job.name in there:
            check(job, there[job.name])
    return there


def give(jobs: Sequence[Job], snapshots: dict[str, JobSnapshot]) -> dict[str, Progress]:
    """Gives the jobs' objects what was read for them; returns the rest, by name."""
    return {job.name: put(job, snapshots[job.name]) for job in jobs if job.name in snapshots}


def _check_names(source: CheckpointFolder, known: Sequence[str], jobs: Sequence[str]) -> None:
    """Raises CheckpointError where a run and its checkpoints are not of the same jobs."""
    new = [name for name in jobs if name not in known]
    gone = [name for name in known if name not in jobs]
    parts = [f"{_listed(new)} not in it"] if new else []
    parts += [f"{_listed(gone)} not in this run"] if gone else []
    if parts:
        raise CheckpointError(
            f"{source} is of a run with other jobs: {', '.join(parts)}. Build the same jobs, with "
            "the same names; or give resume_partly=True, with which jobs that it lacks begin from "
            "the start, and those that this run lacks stay in it as they are"
        )


def _listed(names: Sequence[str]) -> str:
    first = ", ".join(repr(name) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{first}{more} {'is' if len(names) == 1 else 'are'}"
