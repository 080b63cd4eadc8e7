"""The `waterflow` command: the list of its commands, and those that only look.

Nothing heavy is imported before a command runs: `waterflow --help` needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waterflow.cli import cluster, studies, training
from waterflow.cli.shared import (
    FAILED,
    AsJson,
    WholeHelp,
    clean_stdout,
    one_line_errors,
    print_table,
    show,
    write_picture,
)

app = typer.Typer(
    cls=WholeHelp,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain errors: a box of lines is unreadable in a log
    pretty_exceptions_enable=False,
    help="Train several PyTorch jobs in one process under one memory budget.",
)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(_version())
        raise typer.Exit


app.command("demo")(training.demo)
app.command("run")(training.run)
app.command("compare")(training.compare)
app.command("plan")(studies.plan)
app.command("max-batch")(studies.max_batch)
app.command("pair")(studies.pair)
app.add_typer(cluster.app, name="cluster")


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="what `waterflow run --out` wrote")],
    out: Annotated[
        Path | None, typer.Option(help="draw the picture again: a .png, .svg or .pdf file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a saved report, and draw its picture again with --out."""
    from waterflow.report.report import Report

    with one_line_errors():
        loaded = Report.load(directory)
        if out is not None:
            write_picture(out, loaded.picture)
    show(loaded, as_json, Report.table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what works on this machine and what does not; exit code 1 if training does not."""
    import json

    from waterflow.cli.doctor import diagnose, render

    with clean_stdout(as_json):
        diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis))
    else:
        print_table(render(diagnosis))
    raise typer.Exit(0 if diagnosis["ok"] else FAILED)


def main() -> None:
    """Run the command line; the entry point of `waterflow` in a shell."""
    app()


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("waterflow")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    main()
