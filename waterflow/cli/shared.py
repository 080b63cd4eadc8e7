"""What all commands share: options, exit codes, errors in one line, output as a table or as JSON.

Exit codes: 0 all went well, 1 a job failed or a check did not pass, 2 the input was wrong (one line
on stderr says what), 130 interrupted by Ctrl-C. With --json, stdout holds one JSON document and
nothing else: what the user's own code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from typer.core import TyperGroup

from waterflow.common.errors import PlanError, ReportError, WaterflowError
from waterflow.common.text import printable

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout, only that")]

ReportOut = Annotated[
    Path | None,
    typer.Option(
        help="directory for the report; default: waterflow-report, or waterflow-report-2 and so on "
        "where one is there"
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="replace the report that is in the directory")
]
_DEFAULT_FOLDER = "waterflow-report"

_PICTURES = (".png", ".svg", ".pdf")


class _Json(Protocol):
    def to_json(self) -> str: ...


Shown = TypeVar("Shown", bound=_Json)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors in what the user gave into one line on stderr and exit code 2."""
    try:
        yield
    except PlanError:
        raise  # a defect of ours: its traceback is what a bug report needs
    except WaterflowError as error:
        typer.echo(f"waterflow: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("waterflow: interrupted before there was anything to report", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show waterflow's own warnings in one line each: the source below is no news to its author,
    and a job's error may hold whatever a library has put there."""
    usual = warnings.formatwarning

    def one_line(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category.__module__ != WaterflowError.__module__:
            return usual(message, category, filename, lineno, line)
        return f"waterflow: {printable(message)} ({printable(filename)}:{lineno})\n"

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


class WholeHelp(TyperGroup):
    """A group whose list of commands has whole sentences, over several lines if need be."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first paragraph of their help."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                first = (command.help or command.short_help or "").strip().split("\n\n")[0]
                rows.append((name, " ".join(first.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@contextlib.contextmanager
def clean_stdout(as_json: bool) -> Iterator[None]:
    """Keep stdout for the JSON document: what runs inside prints to stderr instead."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def report_folder(out: Path | None, overwrite: bool) -> Path:
    """The folder for a report, made now, not after hours of training. One that has a report is
    taken only where that is to be replaced.

    Raises:
        ReportError: it cannot be made, or holds a report that nobody has asked to replace.
    """
    folder = _free_folder(overwrite) if out is None else out
    if out is not None and _is_report(folder) and not overwrite:
        raise ReportError(
            f"{folder} already holds a report: give another --out, or --overwrite to replace it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write a report to {folder}: {error}") from error
    return folder


def _free_folder(overwrite: bool) -> Path:
    numbered = (f"{_DEFAULT_FOLDER}-{number}" for number in itertools.count(2))
    names = itertools.chain([_DEFAULT_FOLDER], numbered)
    return next(path for path in map(Path, names) if overwrite or not _is_report(path))


def _is_report(folder: Path) -> bool:
    """Whether a folder holds a report, which another one would replace."""
    return (folder / "report.json").exists()


def show(shown: Shown, as_json: bool, table: Callable[[Shown], Any]) -> None:
    """Print a result: one JSON document, or what `table` makes of it."""
    if as_json:
        typer.echo(shown.to_json())
    else:
        print_table(table(shown))


def print_table(table: Any) -> None:
    """Print what rich can render."""
    from rich.console import Console

    Console().print(table)


def check_picture(out: Path | None) -> None:
    """Raise ReportError where a picture's name says no format that can be drawn."""
    if out is not None and out.suffix.lower() not in _PICTURES:
        raise ReportError(f"{out}: a picture's name ends in {', '.join(_PICTURES)}")


def write_picture(out: Path, draw: Callable[[str], bytes]) -> None:
    """Write what `draw` returns for the kind of file that the name asks for."""
    from waterflow.common.files import write_atomically

    check_picture(out)
    try:
        write_atomically(out, draw(out.suffix.lower()[1:]))
    except OSError as error:
        raise ReportError(f"cannot write {out}: {error}") from error
    typer.echo(f"picture written to {out}", err=True)
