"""Jobs that are limited by launching: thousands of small kernels a step, alone and in pairs.

    python -m benchmarks.gpu.launch --json

The goal: two jobs under the default policy at least 1.49 times as fast as under temporal sharing
(Waterwave's best). Ratios of time in the same turns; above 1 means that waterflow is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.options import DEFAULT_POLICY, begin, goal, keep, parser, publish
from benchmarks.gpu.race import Entry, ratio, run_cases

CASES = [("lstm", "fp32", 32), ("mlp", "fp32", 64)]

TINY_CASES = [("lstm", "fp32", 4)]

_PAPER = 1.49


def ours(name: str, jobs: int, policy: str, memory: str) -> Entry:
    """waterflow with so many jobs."""
    options = {"memory": memory, "policy": policy}
    return Entry(name=name, kind="waterflow", jobs=jobs, place=name, options=options)


def entries(memory: str) -> list[Entry]:
    """Pairs by waterflow's default policy, by temporal sharing and in eager loops; and alone."""
    return [
        Entry(name="eager_pair", kind="eager"),
        ours("pair", 2, DEFAULT_POLICY, memory),
        ours("temporal_pair", 2, "temporal", memory),
        Entry(name="eager_alone", kind="eager", jobs=1),
        ours("alone", 1, DEFAULT_POLICY, memory),
        Entry(name="two_streams", kind="threads"),
    ]


def summary(found: dict[str, Any]) -> dict[str, float | None]:
    """The ratios that matter."""
    return {
        "pair_vs_temporal": ratio(found, "temporal_pair", "pair"),
        "pair_vs_eager": ratio(found, "eager_pair", "pair"),
        "pair_vs_two_streams": ratio(found, "two_streams", "pair"),
        "alone_vs_eager": ratio(found, "eager_alone", "alone"),
    }


def goals(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Against temporal sharing, and never behind the plain loop."""
    rows = []
    for found in cases:
        model, ratios = found["model"], found["ratios"]
        rows += [
            goal(f"{model}: pair vs temporal sharing", ratios["pair_vs_temporal"], _PAPER),
            goal(f"{model}: pair vs eager", ratios["pair_vs_eager"], 1.0),
            goal(f"{model}: alone vs eager", ratios["alone_vs_eager"], 1.0),
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "", seconds=120, repeats=5).parse_args(arguments)
    deadline = begin(options)
    memory = options.memory or ("64MiB" if options.tiny else "8GiB")
    result: dict[str, Any] = {"memory": memory, "cases": []}

    def note(found: dict[str, Any]) -> None:
        found["ratios"] = summary(found)
        result["cases"].append(found)
        result["goals"] = goals(result["cases"])
        keep(result, options)

    cases = options.cases or (TINY_CASES if options.tiny else CASES)
    result["not_reached"] = run_cases(
        cases, entries(memory), options, deadline, note, watched=("pair",)
    )
    publish(result, options)


if __name__ == "__main__":
    main()
