"""What all commands share: options, exit codes, errors in one line, output as a table or as JSON.

Exit codes: 0 all went well, 1 a job failed or a check did not pass, 2 the input was wrong (one line
on stderr says what), 130 interrupted by Ctrl-C. With --json, stdout holds one JSON document and
nothing else: what the user's own code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from waterflow.common.errors import PlanError, ReportError, WaterflowError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout, only that")]

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
        typer.echo(f"waterflow: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        typer.echo("waterflow: interrupted before there was anything to report", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def clean_stdout(as_json: bool) -> Iterator[None]:
    """Keep stdout for the JSON document: what runs inside prints to stderr instead."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


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


def write_page(out: Path, make: Callable[[], str]) -> None:
    """Write what `make` returns to `out`."""
    from waterflow.common.files import write_atomically

    try:
        write_atomically(out, make().encode())
    except OSError as error:
        raise ReportError(f"cannot write {out}: {error}") from error
    typer.echo(f"page written to {out}", err=True)


def write_picture(out: Path, draw: Callable[[str], bytes]) -> None:
    """Write what `draw` returns for the kind of file that the name asks for."""
    from waterflow.common.files import write_atomically

    check_picture(out)
    try:
        write_atomically(out, draw(out.suffix.lower()[1:]))
    except OSError as error:
        raise ReportError(f"cannot write {out}: {error}") from error
    typer.echo(f"picture written to {out}", err=True)
