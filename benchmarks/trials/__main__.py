"""Runs the rows that are asked for; see the package."""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import waterflow as wf
from benchmarks import trials
from benchmarks.common import show
from benchmarks.trials import ways
from benchmarks.trials.case import Case, Size
from benchmarks.trials.cases import all_cases

OTHERS = ("processes", "compile", "vmap")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=trials.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved runs of each way")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], help=f"names or patterns: {', '.join(all_cases())}"
    )
    parser.add_argument("--skip", nargs="+", default=[], choices=OTHERS, help="ways to leave out")
    parser.add_argument("--steps-fraction", type=float, default=1.0, help="of each trial's steps")
    parser.add_argument("--most-trials", type=int, help="no more trials than that in a row")
    return parser.parse_args(given)


def chosen(patterns: list[str]) -> list[Case]:
    """The cases that match a pattern.

    Raises:
        SystemExit: a pattern that matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(all_cases(), pattern):
            raise SystemExit(f"--cases: {pattern!r} is none of {', '.join(all_cases())}")
    return [
        case
        for name, case in all_cases().items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def row_of(case: Case, size: Size, skip: list[str], repeats: int) -> dict[str, Any]:
    """Runs a case in every way, in turn."""
    name, case = case.name, case.sized(size)
    seconds: dict[str, list[float | None]] = {}
    all_equal = True
    for _ in range(repeats):
        one_thread, expected = ways.timed(case, ways.loops(ways.lane_threads()))
        all_threads, _ = ways.timed(case, ways.loops(torch.get_num_threads()))
        own, losses = ways.with_waterflow(case)
        all_equal &= losses == expected
        turn = {"one_thread": one_thread, "all_threads": all_threads, "waterflow": own}
        for other, measure in _others(name, case, size).items():
            turn[other] = None if other in skip else measure()
        for way, found in turn.items():
            seconds.setdefault(way, []).append(found)
    medians = {way: _median(found) for way, found in seconds.items()}
    loops = [medians.pop("one_thread"), medians.pop("all_threads")]
    return _row(case, {"eager": min(loops), **medians}, all_equal)


def _others(name: str, case: Case, size: Size) -> dict[str, Callable[[], float | None]]:
    return {
        "processes": lambda: ways.with_processes(name, size),
        "compile": lambda: ways.with_compile(name, size),
        "vmap": lambda: ways.with_vmap(case) if case.stackable else None,
    }


def _median(found: list[float | None]) -> float | None:
    values = [value for value in found if value is not None]
    return statistics.median(values) if values else None


def _row(case: Case, seconds: dict[str, Any], all_equal: bool) -> dict[str, Any]:
    best = min(s for way, s in seconds.items() if way != "waterflow" and s is not None)
    return {
        "case": case.name,
        "trials": case.trials,
        "steps": case.steps,
        **{f"{way}_seconds": seconds[way] for way in ("eager", *OTHERS, "waterflow")},
        "vs_eager": seconds["eager"] / seconds["waterflow"],
        "vs_best": best / seconds["waterflow"],
        "equal": all_equal,
    }


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    warnings.simplefilter("ignore", wf.OpaqueStepWarning)  # the rows tell what it costs
    size = Size(steps_fraction=options.steps_fraction, most_trials=options.most_trials)
    rows = []
    for case in chosen(options.cases):
        try:
            case.prepare()
        except ModuleNotFoundError as error:
            remedy = "pip install 'waterflow[bench]'"
            print(f"{case.name}: skipped, {error.name} is missing: {remedy}", file=sys.stderr)
            continue
        _warm_up(case, options.skip)
        row = row_of(case, size, options.skip, options.repeats)
        print(_line(row), file=sys.stderr if options.json else sys.stdout, flush=True)
        rows.append(row)
    if options.json:
        show({"rows": rows}, as_json=True)


def _warm_up(case: Case, skip: list[str]) -> None:
    """Two steps of one trial, so that what torch and waterflow import when used is there."""
    small = case.sized(Size(steps_fraction=2 / case.steps, most_trials=1))
    small.run(ways.loops(1))
    ways.with_waterflow(small)
    if case.stackable and "vmap" not in skip:
        ways.with_vmap(small)


def _line(row: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return "  ".join(f"{key} {text(value)}" for key, value in row.items())


if __name__ == "__main__":
    main()
