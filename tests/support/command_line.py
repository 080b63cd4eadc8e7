"""The command line, called in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from waterflow.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result):
    """Assert one clear line on stderr and nothing on stdout; return the line."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("waterflow: ")
    assert result.stderr.count("\n") == 1
    return result.stderr
