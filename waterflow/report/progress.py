"""What a run shows while it runs: bars on a terminal, a few plain lines in a log file.

Everything goes to stderr, so that stdout stays the user's. The lanes report steps from their own
threads, thousands a second; a display drops what comes too fast and never lets a broken pipe end
the training.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

from waterflow.common.imports import random_kept
from waterflow.common.text import printable

if TYPE_CHECKING:  # most runs show nothing
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

#: Columns of a terminal from which on there is room for bars, and for rates.
_WIDTH_FOR_BARS, _WIDTH_FOR_RATES = 100, 80
#: What is beside a name at most, the bar left out: steps, loss, rate, state.
_BESIDE_NAME, _LEAST_NAME = 44, 12
_LINE_SECONDS = 2.0
_BAR_SECONDS = 0.1


class ProgressDisplay(Protocol):
    """What the engine needs of a display; any thread may call `update`."""

    def start(self, jobs: Sequence[tuple[str, int | None]]) -> None:
        """Begin, with the jobs' names and total steps (None if not known)."""

    def join(self, name: str, total: int | None) -> None:
        """Add a job, with its total steps (None if not known)."""

    def update(
        self, name: str, step: int, loss: float | None = None, state: str = "running"
    ) -> None:
        """Say that the job has done `step` steps."""

    def stop(self) -> None:
        """End; may be called twice."""


@dataclass
class _Shown:
    """One job as the display knows it; `at` is when it was last drawn, in seconds of the clock."""

    total: int | None
    step: int = 0
    loss: float | None = None
    state: str = "queued"
    first_step: int = 0
    first_at: float | None = None
    at: float = float("-inf")
    bar: TaskID | None = None

    def rate(self, now: float) -> float:
        """Steps per second since the first one seen, so that waiting and capture do not count."""
        if self.first_at is None or now <= self.first_at:
            return 0.0
        return (self.step - self.first_step) / (now - self.first_at)

    def describe(self, now: float) -> str:
        """The job's progress as one line, without its name."""
        of_total = "" if self.total is None else f"/{self.total}"
        loss = "" if self.loss is None else f"  loss {self.loss:.4g}"
        return f"step {self.step}{of_total}{loss}  {self.rate(now):.1f} it/s  {self.state}"


class Progress:
    """Bars, one per job, if `stream` is a terminal; else at most one line per job in two seconds.

    A change of state is always shown. Safe to call from any thread; calls after `stop` do nothing.
    """

    def __init__(
        self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to `stream` (default: stderr as it is now); `clock` returns seconds."""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.RLock()
        self._jobs: dict[str, _Shown] = {}
        self._bars: Bars | None = None
        self._running = False

    def start(self, jobs: Sequence[tuple[str, int | None]]) -> None:
        """Begin, with the jobs' names and total steps (None if not known)."""
        with random_kept():
            from rich.console import Console

        with self._lock:
            self._jobs = {name: _Shown(total) for name, total in jobs}
            self._running = True
            console = Console(file=self._stream)
            if not console.is_terminal:
                return
            self._bars = _make_bars(console)
            for name, job in self._jobs.items():
                job.bar = _add_bar(self._bars, name, job)
            self._bars.start()

    def join(self, name: str, total: int | None) -> None:
        """Add a job, with its total steps (None if not known)."""
        with self._lock:
            if self._running:
                job = self._jobs.setdefault(name, _Shown(total))
                if self._bars is not None and job.bar is None:
                    job.bar = _add_bar(self._bars, name, job)

    def update(
        self, name: str, step: int, loss: float | None = None, state: str = "running"
    ) -> None:
        """Say that the job has done `step` steps; a name not known yet is a job that joined."""
        now = self._clock()
        with self._lock:
            if not self._running:
                return
            job = self._jobs.setdefault(name, _Shown(None))
            due = state != job.state or now - job.at >= self._interval()
            job.step, job.state = step, state
            job.loss = job.loss if loss is None else loss
            if job.first_at is None and step > 0:
                job.first_step, job.first_at = step, now
            if due:
                job.at = now
                self._show(name, job, now)

    def stop(self) -> None:
        """Draw the bars a last time and give the terminal back."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            if self._bars is not None:
                for name, job in self._jobs.items():
                    self._show(name, job, self._clock())
                self._bars.stop()

    def _interval(self) -> float:
        return _LINE_SECONDS if self._bars is None else _BAR_SECONDS

    def _show(self, name: str, job: _Shown, now: float) -> None:
        if self._bars is None:
            self._print(f"{printable(name)}: {job.describe(now)}")
            return
        if job.bar is None:
            job.bar = _add_bar(self._bars, name, job)
        detail = _detail(job, now, self._bars.console.width)
        self._bars.update(job.bar, completed=job.step, steps=_steps(job), detail=detail)

    def _print(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._running = False  # a closed pipe or file; the training is worth more than its log


def _make_bars(console: Console) -> Bars:
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    # Every column but the bar is as wide as it is: what does not fit is the bar, then the rate, and
    # long names end in "...". Cut by rich, the state would go first.
    whole = Column(no_wrap=True)
    columns: list[ProgressColumn] = [TextColumn("{task.fields[shown]}", table_column=whole)]
    if console.width >= _WIDTH_FOR_BARS:
        columns.append(BarColumn(bar_width=console.width // 5))
    columns += [
        TextColumn("{task.fields[steps]}", table_column=Column(no_wrap=True, justify="right")),
        TextColumn("{task.fields[detail]}", table_column=whole),
    ]
    return Bars(
        *columns,
        console=console,
        # rich sends what others print to its own console, stderr: right above the bars on a
        # terminal, wrong when the user has sent stdout to a file.
        redirect_stdout=sys.stdout.isatty(),
    )


def _add_bar(bars: Bars, name: str, job: _Shown) -> TaskID:
    from rich.markup import escape

    width = bars.console.width
    room = width - _BESIDE_NAME - (width // 5 if width >= _WIDTH_FOR_BARS else 0)
    # rich reads "[a]" as markup in every text column.
    shown = escape(_clipped(printable(name), max(room, _LEAST_NAME)))
    steps, detail = _steps(job), job.state
    return bars.add_task("", total=job.total, shown=shown, steps=steps, detail=detail)


def _clipped(name: str, most: int) -> str:
    """The name in so many columns of a terminal, with dots where something is left out."""
    from rich.cells import cell_len, set_cell_size

    return name if cell_len(name) <= most else f"{set_cell_size(name, most - 3).rstrip()}..."


def _steps(job: _Shown) -> str:
    return str(job.step) if job.total is None else f"{job.step}/{job.total}"


def _detail(job: _Shown, now: float, width: int) -> str:
    loss = "" if job.loss is None else f"loss {job.loss:.4g}  "
    rate = f"{job.rate(now):.1f} it/s  " if width >= _WIDTH_FOR_RATES else ""
    return f"{loss}{rate}{job.state}"
