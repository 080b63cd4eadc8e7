"""What of PyTorch's users' steps is captured, and whether anything differs from the eager loop.

    python -m benchmarks.coverage --json
    python -m benchmarks.coverage --suite op_db --fraction 0.25 --workers 2

Every case trains by the eager loop and by the engine; losses, parameters, buffers and the
optimizer's state are compared by bits. `opaque`: trained as eager Python or with an eager
optimizer; `refused`: eager trains it and the engine does not; `crashed`: the process died or did
not answer; `skipped`: eager itself fails. The captured share is of those that were not skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.coverage.pool import Task, run_all
from benchmarks.coverage.suites import SUITES, MissingSuiteError, load
from benchmarks.coverage.trial import Kind, Outcome

_COUNTED = (Kind.CAPTURED, Kind.OPAQUE, Kind.REFUSED, Kind.DIFFERENT, Kind.CRASHED, Kind.SKIPPED)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document, nothing else")
    add("--suite", nargs="+", choices=SUITES, default=list(SUITES), metavar="NAME")
    add("--only", default="", metavar="TEXT", help="cases whose names contain this text")
    add("--limit", type=int, default=None, help="cases of each suite at most")
    add("--fraction", type=float, default=1.0, help="share of the cases, chosen by their names")
    add("--seconds", type=float, default=120.0, help="time that one case may take")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    add("--audit", choices=("all", "log", "off"), default="log", help="how often jobs are checked")
    return parser.parse_args(arguments)


def chosen(names: Sequence[str], fraction: float) -> list[str]:
    """A fixed share of the names: a hash of each decides, so it is the same on every machine."""
    return [name for name in names if zlib.crc32(name.encode()) < fraction * 2**32]


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Tries the suites and returns the JSON document."""
    started = time.monotonic()
    found: dict[str, dict[str, Outcome]] = {}
    missing: dict[str, str] = {}
    tasks: list[Task] = []
    for suite in options.suite:
        try:
            names = load(suite).names()
        except MissingSuiteError as error:
            missing[suite] = str(error)
            continue
        found[suite] = {}
        wanted = [name for name in chosen(names, options.fraction) if options.only in name]
        tasks += [Task(suite, name) for name in wanted[: options.limit]]

    def done(task: Task, outcome: Outcome) -> None:
        found[task.suite][task.name] = outcome
        count = sum(map(len, found.values()))
        if outcome.kind is not Kind.CAPTURED:
            kind = outcome.kind.name.lower()
            print(f"{task.suite} {task.name}: {kind}: {_line(outcome.reason)}", file=sys.stderr)
        print(f"{count}/{len(tasks)} ", end="\r", file=sys.stderr, flush=True)

    run_all(tasks, options.workers, options.seconds, options.audit, done)
    return {
        "suites": {suite: _summary(outcomes) for suite, outcomes in found.items()},
        "missing": missing,
        "versions": _versions(),
        "machine": platform.machine(),
        "seconds": round(time.monotonic() - started, 1),
    }


def _summary(outcomes: dict[str, Outcome]) -> dict[str, object]:
    counts = Counter(outcome.kind for outcome in outcomes.values())
    tried = len(outcomes) - counts[Kind.SKIPPED]
    bad = [(name, found) for name, found in outcomes.items() if found.kind > Kind.CAPTURED]
    bad.sort(key=lambda entry: (-entry[1].kind, entry[0]))
    return {
        **{kind.name.lower(): counts[kind] for kind in _COUNTED},
        "cases": len(outcomes),
        "captured_share": round(counts[Kind.CAPTURED] / tried, 4) if tried else None,
        "worst": [f"{name}: {o.kind.name.lower()}: {_line(o.reason)}" for name, o in bad],
    }


def _line(text: str) -> str:
    return " ".join(text.split())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("waterflow", "transformers", "timm", "torchvision"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _table(result: dict[str, object]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("suite", no_wrap=True)
    headings = [*(kind.name.lower() for kind in _COUNTED), "cases", "captured_share"]
    for heading in headings:
        table.add_column(heading.replace("captured_", ""), justify="right")
    suites = result["suites"]
    assert isinstance(suites, dict)
    for suite, row in suites.items():
        table.add_row(suite, *(str(row[heading]) for heading in headings))
    missing = result["missing"]
    assert isinstance(missing, dict)
    for suite in missing:
        table.add_row(suite, "not installed")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    os.environ["WATERFLOW_TIERS"] = "off"  # what can be captured, and not whether that would pay
    with tempfile.TemporaryDirectory(prefix="coverage-cache-") as cache:
        os.environ.setdefault("WATERFLOW_CACHE", cache)
        result = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))


if __name__ == "__main__":
    main()
