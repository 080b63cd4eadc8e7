"""What the GPU benchmarks' command lines share: options, a time limit, and the result's file."""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import waterflow as wf
from benchmarks.common import show
from benchmarks.gpu.summary import goal_lines
from waterflow.common.files import write_atomically
from waterflow.partitioner.policies import POLICIES

#: The policy that `wf.run` has where none is named: what the goals are about.
DEFAULT_POLICY: str = inspect.signature(wf.run).parameters["policy"].default


def parser(description: str, *, seconds: float, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options that all of these benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--tiny", action="store_true", help="tiny models: tries the logic only")
    made.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    made.add_argument("--out", type=Path, help="keep what is known so far in this JSON file")
    made.add_argument("--seconds", type=float, default=seconds, help="stop after about so long")
    made.add_argument("--repeats", type=int, default=repeats, help="turns of every contender")
    made.add_argument("--memory", help="the budget of waterflow's jobs")
    made.add_argument("--cases", type=cases, help='such as "resnet50:bf16:64,mlp:fp32:32"')
    return made


def cases(text: str) -> list[tuple[str, str, int]]:
    """The type of `--cases`: model, dtype and batch of each."""
    parts = [part.split(":") for part in names(text)]
    return [(model, dtype, int(batch)) for model, dtype, batch in parts]


def names(text: str) -> list[str]:
    """The type of an option that is a list: "a,b"."""
    return [part for part in text.split(",") if part]


def policies(given: list[str] | None = None) -> list[str]:
    """The policies to run, the default one first; all that exist unless some are given."""
    wanted = list(POLICIES) if given is None else given
    return sorted(wanted, key=lambda name: name != DEFAULT_POLICY)


def goal(
    what: str, value: float | bool | None, wanted: float | bool, at_most: bool = False
) -> dict[str, Any]:
    """A row of the last table: what was reached, what was to be reached, and whether it was."""
    met = None
    if value is not None:
        met = bool(value <= wanted if at_most else value >= wanted)
    return {"what": what, "value": value, "goal": wanted, "at_most": at_most, "met": met}


def begin(options: argparse.Namespace) -> float:
    """The deadline; from here on, SIGTERM ends the program in order (processes, MPS daemon)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return time.monotonic() + options.seconds


def keep(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the result so far into the file, whole or not at all."""
    if options.out is None:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(result).encode())


def publish(result: dict[str, Any], options: argparse.Namespace) -> None:
    """The end of a benchmark: the file, and one JSON line or the goals on stdout."""
    keep(result, options)
    if options.json:
        show(result, as_json=True)
        return
    print("\n".join(goal_lines(result.get("goals", []))))
