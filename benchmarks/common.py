"""What the benchmarks share: interleaved medians, and one JSON line."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Mapping

import torch


def arguments(description: str, repeats: int, **numbers: str) -> argparse.Namespace:
    """``--json`` and ``--repeats``; and options that are whole numbers, None where they are left
    out, by name with what they mean."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved runs of each")
    for name, meaning in numbers.items():
        parser.add_argument(f"--{name}", type=int, help=meaning)
    return parser.parse_args()


def interleaved(
    measures: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Runs every measure in turn, again and again, so that noise hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def show(result: dict[str, object], as_json: bool) -> None:
    """Prints the result: a JSON line with the machine, or one line per key."""
    if as_json:
        machine = {"torch": torch.__version__, "cores": torch.get_num_threads()}
        print(json.dumps({**result, **machine, "machine": platform.machine()}))
        return
    for key, value in result.items():
        print(f"{key:28} {value:.3f}" if isinstance(value, float) else f"{key:28} {value}")
