"""Options of single jobs on the command line: `--priority JOB=guaranteed` and the like."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from waterflow.common.errors import JobError
from waterflow.common.units import parse_bytes

if TYPE_CHECKING:
    from waterflow.job.job import Job


class JobOption(NamedTuple):
    """A field of the job of this name is to have a value."""

    option: str
    job: str
    field: str
    value: Any


def parse_job_options(
    priorities: Sequence[str],
    weights: Sequence[str],
    limits: Sequence[str],
    slowdowns: Sequence[str] = (),
) -> list[JobOption]:
    """What was given, before the file of jobs runs, which may take minutes.

    Args:
        priorities, weights, limits, slowdowns: texts such as "prod=guaranteed", "prod=2",
            "prod=2GiB" and "prod=0.05".

    Raises:
        JobError: one of them is no such text; says which and how it is written.
    """
    return [
        *_parsed("--priority", "priority", priorities, _priority, "prod=guaranteed"),
        *_parsed("--weight", "weight", weights, float, "prod=2"),
        *_parsed("--memory-limit", "memory_limit", limits, parse_bytes, "prod=2GiB"),
        *_parsed("--max-slowdown", "max_slowdown", slowdowns, float, "prod=0.05"),
    ]


def _priority(value: str) -> str:
    from waterflow.job.job import check_priority

    check_priority(value)
    return value


def _parsed(
    option: str, field: str, texts: Sequence[str], parse: Callable[[str], Any], example: str
) -> list[JobOption]:
    found: dict[str, JobOption] = {}
    for text in texts:
        job, equals, value = text.rpartition("=")  # names of jobs may have one
        if not equals or not job:
            raise JobError(f"{option} {text}: expected JOB=VALUE, such as {option} {example}")
        if job in found:
            raise JobError(f"{option} {text}: job {job!r} has a value already; give it one")
        try:
            found[job] = JobOption(option, job, field, parse(value))
        except JobError as error:
            raise JobError(f"{option} {text}: {error}") from None
        except ValueError:
            raise JobError(f"{option} {text}: {value!r} is no number") from None
    return list(found.values())


def apply_job_options(jobs: Sequence[Job], options: Sequence[JobOption]) -> None:
    """Gives jobs what was asked for; it goes before what the file says.

    Raises:
        JobError: there is no such job, with the nearest names; or the job cannot have that.
    """
    named = {job.name: job for job in jobs}
    for option, name, field, value in options:
        if name not in named:
            near = difflib.get_close_matches(name, named, n=3, cutoff=0.4) or sorted(named)[:8]
            listed = ", ".join(map(repr, near))
            raise JobError(f"{option}: there is no job {name!r} in the file; nearest: {listed}")
        try:
            named[name].change(**{field: value})
        except JobError as error:
            raise JobError(f"{option} {name}={value}: {error}") from None
