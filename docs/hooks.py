"""What the pages cannot say themselves: mkdocs calls these functions while it builds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of all commands, as typer writes it, where a page asks for it."""
    return markdown.replace(MARK, _commands()) if MARK in markdown else markdown


def _commands() -> str:
    typer = [sys.executable, "-m", "typer", "waterflow.cli.main", "utils", "docs"]
    command = [*typer, "--name", "waterflow"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.removeprefix("# `waterflow`\n")
