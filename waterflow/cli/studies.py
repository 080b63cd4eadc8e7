"""The commands that answer without training: `waterflow plan`, `max-batch` and `pair`.

What a command needs is imported when it runs, so that help and wrong options answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waterflow.cli.shared import (
    FAILED,
    AsJson,
    check_picture,
    clean_stdout,
    one_line_errors,
    print_table,
    show,
    write_picture,
)

PlanJobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="see above")]
PlanMemory = Annotated[str, typer.Option(help='budget for all jobs, like "32GiB"')]
PlanHardware = Annotated[
    str | None,
    typer.Option(
        help="times are estimated for p100, v100, a100, h100, h200 or cpu; default: this machine's"
    ),
]


def plan(
    jobs: PlanJobs,
    memory: PlanMemory,
    hardware: PlanHardware = None,
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
    import waterflow as wf
    from waterflow.study import view

    with one_line_errors(), clean_stdout(as_json):
        check_picture(out)
        found = wf.plan(jobs, memory, hardware=hardware, measure=measure)
        if out is not None:
            write_picture(out, lambda kind: view.draw_plan(found, kind))
    show(found, as_json, view.plan_table)
    raise typer.Exit(0 if found.fits else FAILED)


def max_batch(
    jobs: PlanJobs,
    memory: PlanMemory,
    copies: Annotated[
        int, typer.Option("--jobs", min=1, help="train that many of each JOB together")
    ] = 1,
    hardware: PlanHardware = None,
    out: Annotated[
        Path | None, typer.Option(help="draw overlap against batch: .png, .svg, .pdf")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest batches that fit a budget, alone and together, without training.

    JOB is a model (resnet50) or a factory in a file (models.py:make_job); name one twice, or use
    --jobs 2, to train it beside itself.
    """
    import waterflow as wf
    from waterflow.study import view

    with one_line_errors(), clean_stdout(as_json):
        check_picture(out)
        named = [job for job in jobs for _ in range(copies)]
        found = wf.max_batch(named, memory, hardware=hardware, frontier=out is not None)
        if out is not None:
            write_picture(out, lambda kind: view.draw_frontier(found, kind))
    show(found, as_json, view.max_batch_table)


def pair(
    jobs: PlanJobs,
    memory: PlanMemory,
    hardware: PlanHardware = None,
    as_json: AsJson = False,
) -> None:
    """Suggest which two of some candidates to train together, and the batch for each."""
    import json

    import waterflow as wf
    from waterflow.study import view

    with one_line_errors(), clean_stdout(as_json):
        found = wf.pair(jobs, memory, hardware=hardware)
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in found]))
    else:
        print_table(view.pair_table(found))
