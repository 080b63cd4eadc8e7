"""A command in a terminal of its own: a pseudo-terminal of a given width, and a real process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

#: Where a line on the screen ends, or is written anew.
_BREAKS = re.compile(r"\r|\n|\x1b\[[0-9]*[A-HJK]")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: What a program of ours may write of controls: line feeds, returns, and rich's own sequences.
_FOREIGN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Screen:
    """What a terminal was sent.

    Attributes:
        raw: as it was sent.
        code: the process's exit code.
        width: of the terminal.
    """

    raw: str
    code: int
    width: int

    @property
    def text(self) -> str:
        """Without colours and movements of the cursor."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    @property
    def joined(self) -> str:
        """Without any white space: words that were folded are whole again."""
        return "".join(self.text.split())

    @property
    def lines(self) -> list[str]:
        """Each line that was written, also those that were written anew later."""
        return [_ESCAPES.sub("", line) for line in _BREAKS.split(self.raw)]

    @property
    def too_wide(self) -> list[str]:
        """Lines that a terminal of this width would have broken."""
        return [line for line in self.lines if cell_len(line) > self.width]

    @property
    def foreign_controls(self) -> list[str]:
        """Control characters that no table and no bar needs."""
        return _FOREIGN.findall(_ESCAPES.sub("", self.raw))


_HEIGHT = 50
#: Runs a command in a terminal that is given one width after another: to start a process is what
#: takes the time.
_AT_WIDTHS = f"""
import fcntl, struct, sys, termios
from waterflow.cli.main import main

for width in sys.argv.pop(1).split(","):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", {_HEIGHT}, int(width), 0, 0))
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    print(end=f"\\0{{code or 0}}\\0", flush=True)
"""
_ENDS = re.compile(r"\x00(\d+)\x00")


def in_terminal(*arguments: str, width: int, cwd: Path, timeout: float = 250.0) -> Screen:
    """Runs ``python -m waterflow`` with these arguments in a pseudo-terminal."""
    raw, code = _sent(["-m", "waterflow", *arguments], width, cwd, timeout)
    return Screen(raw, code, width)


def at_widths(
    *arguments: str, widths: Sequence[int], cwd: Path, timeout: float = 250.0
) -> list[Screen]:
    """Runs the command again and again, in one process, in a terminal of one width after another.
    For what leaves nothing behind that the next one would find."""
    program = ["-c", _AT_WIDTHS, ",".join(map(str, widths)), *arguments]
    raw, code = _sent(program, widths[0], cwd, timeout)
    *found, rest = _ENDS.split(raw)
    assert code == 0, raw
    assert rest == ""
    each = zip(found[::2], found[1::2], widths, strict=True)
    return [Screen(text, int(ended), width) for text, ended, width in each]


def _sent(program: Sequence[str], width: int, cwd: Path, timeout: float) -> tuple[str, int]:
    """What a Python process sends to a terminal, and its exit code."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, width, 0, 0))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")
    }
    environment |= {"TERM": "xterm-256color", "WATERFLOW_CACHE": str(cwd / "cache")}
    process = subprocess.Popen(
        [sys.executable, *program],
        stdin=side, stdout=side, stderr=side, cwd=cwd, env=environment, close_fds=True,
        start_new_session=True,
    )  # fmt: skip
    os.close(side)
    sent, until = b"", time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            if not select.select([main], [], [], 0.5)[0]:
                continue
            try:
                got = os.read(main, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not got:
                break
            sent += got
        return sent.decode("utf-8", "replace"), process.wait(timeout=300)
    finally:
        process.kill()
        os.close(main)
