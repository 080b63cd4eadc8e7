"""The `waterflow` command.

Exit codes: 0 all went well, 1 a job failed or a check did not pass, 2 the input was wrong (one line
on stderr says what), 130 interrupted by Ctrl-C. With --json, stdout holds one JSON document and
nothing else: what the user's own code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console

from waterflow.common.errors import (
    DeviceLostError,
    JobError,
    PlanError,
    ReportError,
    WaterflowError,
)
from waterflow.common.files import write_atomically
from waterflow.common.units import parse_bytes
from waterflow.partitioner.policies import POLICIES, get_policy
from waterflow.report.report import Report

if TYPE_CHECKING:
    from waterflow.job.job_file import JobFile

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


class _Json(Protocol):
    def to_json(self) -> str: ...


Shown = TypeVar("Shown", bound=_Json)

_PICTURES = (".png", ".svg", ".pdf")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain errors: a box of lines is unreadable in a log
    pretty_exceptions_enable=False,
    help="Train several PyTorch jobs in one process under one memory budget.",
)

JobsFile = Annotated[Path, typer.Argument(metavar="FILE.py", help="has a function jobs()")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout, only that")]
Memory = Annotated[
    str | None,
    typer.Option(help='budget for all jobs, like "512MiB"; default: MEMORY in the file'),
]
Device = Annotated[str, typer.Option(help='where to train: "cpu", "cuda" or "cuda:1"')]
PolicyName = Annotated[str, typer.Option(help=", ".join(POLICIES))]
PlanJobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="see above")]
PlanMemory = Annotated[str, typer.Option(help='budget for all jobs, like "32GiB"')]
PlanHardware = Annotated[
    str, typer.Option(help="times are estimated for p100, v100, a100, h100, h200 or cpu")
]


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(_version())
        raise typer.Exit


@app.command()
def demo(
    as_json: AsJson = False,
    memory: Annotated[str | None, typer.Option(help='budget, like "512MiB"')] = None,
    out: Annotated[Path | None, typer.Option(help="directory to write the report to")] = None,
) -> None:
    """Train some small jobs side by side and check every number against eager training."""
    with _one_line_errors():
        if memory is not None:
            parse_bytes(memory)
        try:
            from waterflow.cli.demo import main as run_demo

            code = run_demo(json=as_json, memory=memory, out=out)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("sklearn"):
                raise
            remedy = "pip install 'waterflow[demo]'"
            raise JobError(f"the demo needs scikit-learn: {remedy}") from None
    raise typer.Exit(code)


@app.command()
def run(
    file: JobsFile,
    memory: Memory = None,
    device: Device = "cpu",
    policy: PolicyName = "flow",
    out: Annotated[Path, typer.Option(help="directory for the report")] = Path("waterflow-report"),
    as_json: AsJson = False,
) -> None:
    """Train the jobs of FILE.py together and write a report."""
    with _one_line_errors(), _clean_stdout(as_json):
        get_policy(policy)
        _check_out(out)
        job_file, budget = _load(file, memory)
        jobs = job_file.make_jobs()
        import waterflow as wf

        try:
            result = wf.run(jobs, memory=budget, device=device, policy=policy, progress=True)
        except DeviceLostError as lost:  # what the host holds is saved, then the process must end
            lost.report.save(out)
            typer.echo(f"error: {lost}\nreport written to {out}", err=True)
            raise typer.Exit(FAILED) from None
        result.save(out)
    _show(result, as_json, Report.table)
    typer.echo(f"report written to {out}", err=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result.ok else FAILED)


@app.command()
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

    with _one_line_errors(), _clean_stdout(as_json):
        policies = policy or list(POLICIES)
        for name in policies:
            get_policy(name)
        job_file, budget = _load(file, memory)
        result = compare_jobs(job_file.make_jobs, budget, policies, device)
    if as_json:
        typer.echo(result.to_json())
    else:
        Console().print(result.table())
    if result.interrupted:
        typer.echo("interrupted: the comparison is not complete", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result.ok else FAILED)


@app.command()
def plan(
    jobs: PlanJobs,
    memory: PlanMemory,
    hardware: PlanHardware = "v100",
    measure: Annotated[
        bool, typer.Option("--measure", help="run each step of a file's jobs once, on copies")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="draw memory over time: .png, .svg, .pdf")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether jobs fit a budget together, without training: peak, overlap, predicted speed.

    JOB is a model with a batch (resnet50:batch=160), a factory in a file with a batch
    (models.py:make_job:batch=8) or a file with a function jobs(). Exit code 1: they do not fit.
    """
    from waterflow.study import study, view

    with _one_line_errors(), _clean_stdout(as_json):
        _check_picture(out)
        found = study.plan(jobs, memory, hardware=hardware, measure=measure)
        if out is not None:
            _write_picture(out, lambda kind: view.draw_plan(found, kind))
    _show(found, as_json, view.plan_table)
    raise typer.Exit(0 if found.fits else FAILED)


@app.command("max-batch")
def max_batch(
    jobs: PlanJobs,
    memory: PlanMemory,
    copies: Annotated[
        int, typer.Option("--jobs", min=1, help="train that many of each JOB together")
    ] = 1,
    hardware: PlanHardware = "v100",
    out: Annotated[
        Path | None, typer.Option(help="draw overlap against batch: .png, .svg, .pdf")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest batches that fit a budget, alone and together, without training.

    JOB is a model (resnet50) or a factory in a file (models.py:make_job); name one twice, or use
    --jobs 2, to train it beside itself.
    """
    from waterflow.study import study, view

    with _one_line_errors(), _clean_stdout(as_json):
        _check_picture(out)
        named = [job for job in jobs for _ in range(copies)]
        found = study.max_batch(named, memory, hardware=hardware, frontier=out is not None)
        if out is not None:
            _write_picture(out, lambda kind: view.draw_frontier(found, kind))
    _show(found, as_json, view.max_batch_table)


@app.command()
def pair(
    jobs: PlanJobs,
    memory: PlanMemory,
    hardware: PlanHardware = "v100",
    as_json: AsJson = False,
) -> None:
    """Suggest which two of some candidates to train together, and the batch for each."""
    import json

    from waterflow.study import study, view

    with _one_line_errors(), _clean_stdout(as_json):
        found = study.pair(jobs, memory, hardware=hardware)
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in found]))
    else:
        Console().print(view.pair_table(found))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="what `waterflow run --out` wrote")],
    out: Annotated[
        Path | None, typer.Option(help="draw the picture again: a .png, .svg or .pdf file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a saved report, and draw its picture again with --out."""
    with _one_line_errors():
        loaded = Report.load(directory)
        if out is not None:
            _write_picture(out, loaded.picture)
    _show(loaded, as_json, Report.table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what works on this machine and what does not; exit code 1 if training does not."""
    import json

    from waterflow.cli.doctor import diagnose, render

    with _clean_stdout(as_json):
        diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis))
    else:
        Console().print(render(diagnosis))
    raise typer.Exit(0 if diagnosis["ok"] else FAILED)


def main() -> None:
    """Run the command line; the entry point of `waterflow` in a shell."""
    app()


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn errors in what the user gave into one line on stderr and exit code 2."""
    try:
        yield
    except PlanError:
        raise  # a defect of ours: its traceback is what a bug report needs
    except WaterflowError as error:
        typer.echo(f"waterflow: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("waterflow: interrupted before there was anything to report", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _clean_stdout(as_json: bool) -> Iterator[None]:
    """Keep stdout for the JSON document: what runs inside prints to stderr instead."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _load(file: Path, memory: str | None) -> tuple[JobFile, int]:

    from waterflow.job.job_file import load_job_file

    budget = None if memory is None else parse_bytes(memory)  # before the file runs for minutes
    job_file = load_job_file(file)
    if budget is None:
        if job_file.memory is None:
            raise JobError(f"no memory budget: give --memory 512MiB, or set MEMORY in {file}")
        budget = parse_bytes(job_file.memory)
    return job_file, budget


def _check_out(out: Path) -> None:
    # Now, not after hours of training.
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write a report to {out}: {error}") from error


def _check_picture(out: Path | None) -> None:
    if out is not None and out.suffix.lower() not in _PICTURES:
        raise ReportError(f"{out}: a picture's name ends in {', '.join(_PICTURES)}")


def _write_picture(out: Path, draw: Callable[[str], bytes]) -> None:
    """Write what `draw` returns for the kind of file that the name asks for."""
    _check_picture(out)
    try:
        write_atomically(out, draw(out.suffix.lower()[1:]))
    except OSError as error:
        raise ReportError(f"cannot write {out}: {error}") from error
    typer.echo(f"picture written to {out}", err=True)


def _show(shown: Shown, as_json: bool, table: Callable[[Shown], Any]) -> None:
    if as_json:
        typer.echo(shown.to_json())
    else:
        Console().print(table(shown))


def _version() -> str:
    try:
        return metadata.version("waterflow")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    main()
