"""The commands that train: `waterflow demo`, `run` and `compare`.

What a command needs is imported when it runs, so that help and wrong options answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from waterflow.cli.job_options import apply_job_options, parse_job_options
from waterflow.cli.shared import (
    FAILED,
    INTERRUPTED,
    AsJson,
    Overwrite,
    ReportOut,
    clean_stdout,
    one_line_errors,
    plain_warnings,
    print_table,
    report_folder,
    show,
)
from waterflow.common.errors import DeviceLostError, JobError
from waterflow.common.text import printable
from waterflow.common.units import parse_bytes

if TYPE_CHECKING:
    from waterflow.job.job_file import JobFile

#: As they are named in `waterflow.partitioner.policies`, which takes a while to import.
POLICY_NAMES = ("flow", "temporal", "time-slice", "waterwave", "waterwave-s")

JobsFile = Annotated[Path, typer.Argument(metavar="FILE.py", help="has a function jobs()")]
Memory = Annotated[
    str | None,
    typer.Option(help='budget for all jobs, like "512MiB"; default: MEMORY in the file'),
]
Device = Annotated[str, typer.Option(help='where to train: "cpu", "cuda" or "cuda:1"')]
PolicyName = Annotated[str, typer.Option(help=", ".join(POLICY_NAMES))]


def demo(
    as_json: AsJson = False,
    memory: Annotated[str | None, typer.Option(help='budget, like "512MiB"')] = None,
    out: ReportOut = None,
    overwrite: Overwrite = False,
) -> None:
    """Train some small jobs side by side and check every number against eager training."""
    with one_line_errors():
        if memory is not None:
            parse_bytes(memory)
        try:
            from waterflow.cli.demo import main as run_demo

            code = run_demo(json=as_json, memory=memory, out=report_folder(out, overwrite))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("sklearn"):
                raise
            remedy = "pip install 'waterflow[demo]'"
            raise JobError(f"the demo needs scikit-learn: {remedy}") from None
    raise typer.Exit(code)


def run(
    file: JobsFile,
    memory: Memory = None,
    device: Device = "cpu",
    policy: PolicyName = "flow",
    spill: Annotated[
        str | None,
        typer.Option(help="plan jobs that do not fit into the memory, by spilling: memory or disk"),
    ] = None,
    priority: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB=WORD", help="guaranteed, normal or opportunistic; repeatable"),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB=NUMBER", help="a job's share among equals; repeatable"),
    ] = None,
    memory_limit: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB=SIZE", help='plan a job into so much, like "2GiB"; repeatable'),
    ] = None,
    max_slowdown: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB=NUMBER", help="a guaranteed job's; 0.01 is 1 %; repeatable"),
    ] = None,
    out: ReportOut = None,
    overwrite: Overwrite = False,
    quantum: Annotated[
        str | None, typer.Option(help='turn in memory under time-slice, like "60s"')
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="directory for a checkpoint of each job")
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help='like "5min" (the default), "90" (seconds) or "100 steps"')
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="directory of checkpoints to go on from; may be --checkpoint's, and new"),
    ] = None,
    resume_partly: Annotated[
        bool, typer.Option("--resume-partly", help="other jobs than those of --resume may be there")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the jobs of FILE.py together and write a report."""
    from waterflow.partitioner.policies import get_policy
    from waterflow.report.report import Report

    with one_line_errors(), clean_stdout(as_json), plain_warnings():
        get_policy(policy)
        given = parse_job_options(
            priority or [], weight or [], memory_limit or [], max_slowdown or []
        )
        out = report_folder(out, overwrite)
        job_file, budget = _load(file, memory)
        jobs = job_file.make_jobs()
        apply_job_options(jobs, given)
        import waterflow as wf

        try:
            result = wf.run(
                jobs,
                memory=budget,
                device=device,
                policy=policy,
                progress=True,
                quantum=quantum,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
                resume=resume,
                resume_partly=resume_partly,
                spill=spill or False,
            )
        except wf.RunInterrupted as stopped:
            result = stopped.report
        except DeviceLostError as lost:  # what the host holds is saved, then the process must end
            lost.report.save(out, overwrite=True)
            typer.echo(f"error: {printable(lost)}\nreport written to {out}", err=True)
            raise typer.Exit(FAILED) from None
        result.save(out, overwrite=True)
    show(result, as_json, Report.table)
    typer.echo(f"report written to {out}", err=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result.ok else FAILED)


def compare(
    file: JobsFile,
    memory: Memory = None,
    device: Device = "cpu",
    policy: Annotated[
        list[str] | None, typer.Option(help="only this policy; may be repeated")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the jobs of FILE.py under each policy and eagerly: time, speed, peak, equal losses."""
    from waterflow.cli.compare import compare as compare_jobs
    from waterflow.partitioner.policies import COMPARED, get_policy

    with one_line_errors(), clean_stdout(as_json), plain_warnings():
        policies = policy or list(COMPARED)
        for name in policies:
            get_policy(name)
        job_file, budget = _load(file, memory)
        result = compare_jobs(job_file.make_jobs, budget, policies, device)
    if as_json:
        typer.echo(result.to_json())
    else:
        print_table(result.table())
    if result.interrupted:
        typer.echo("interrupted: the comparison is not complete", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result.ok else FAILED)


def _load(file: Path, memory: str | None) -> tuple[JobFile, int]:
    from waterflow.job.job_file import load_job_file

    budget = None if memory is None else parse_bytes(memory)  # before the file runs for minutes
    job_file = load_job_file(file)
    if budget is None:
        if job_file.memory is None:
            raise JobError(f"no memory budget: give --memory 512MiB, or set MEMORY in {file}")
        budget = parse_bytes(job_file.memory)
    return job_file, budget
