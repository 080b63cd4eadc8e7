"""Throughput of two jobs, against what a user would run instead.

    python -m benchmarks.gpu.throughput --json

Small to large batches, fp32 and bf16. `ratios`: time of each other way over waterflow's in the same
turns, above 1 means that waterflow is faster. `best`: samples per second of each way at its own
best batch. The goals: ahead of each at its best, never under 0.98 of one job after another.
Cases come in the order of what they tell, as many as the time allows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.mps import NO_CUDA, mps
from benchmarks.gpu.options import (
    DEFAULT_POLICY,
    begin,
    goal,
    keep,
    names,
    parser,
    policies,
    publish,
)
from benchmarks.gpu.race import Entry, ratio, run_cases

#: Model, dtype, batch per job. The first row of each model and dtype tells most.
CASES = [
    ("resnet50", "fp32", 32),
    ("bert_base", "bf16", 32),
    ("lstm", "fp32", 32),
    ("resnet50", "bf16", 128),
    ("bert_base", "fp32", 16),
    ("mlp", "fp32", 64),
    ("resnet50", "fp32", 128),
    ("bert_base", "bf16", 128),
    ("resnet50", "bf16", 32),
    ("bert_base", "fp32", 64),
    ("lstm", "bf16", 32),
    ("lstm", "fp32", 512),
    ("mlp", "fp32", 2048),
    ("resnet50", "fp32", 8),
    ("bert_base", "bf16", 8),
]

TINY_CASES = [("resnet50", "fp32", 4), ("mlp", "bf16", 4)]

#: A case may take so long, torch.compile included.
_CASE_SECONDS = 150.0


def entries(
    device: str, memory: str, wanted: list[str], mps_clients: dict[str, str], no_mps: str | None
) -> list[Entry]:
    """Who takes part: the eager loop and waterflow's default policy first."""
    cuda_only = NO_CUDA if device == "cpu" else None
    return [
        Entry(name="eager", kind="eager"),
        *(ours(policy, memory) for policy in policies(wanted)),
        Entry(name="two_processes", kind="eager", processes=2, place="process"),
        Entry(
            name="two_processes_mps",
            kind="eager",
            processes=2,
            place="mps",
            environment=mps_clients,
            unavailable=no_mps,
        ),
        Entry(name="two_streams", kind="threads"),
        *two_streams_elsewhere(cuda_only),
        Entry(name="vmap", kind="vmap"),
        # Last: where it compiles for too long, the others have been made.
        Entry(name="compile", kind="compile", place="compile", unavailable=cuda_only),
    ]


def ours(policy: str, memory: str) -> Entry:
    """waterflow by a policy."""
    options = {"memory": memory, "policy": policy}
    return Entry(name=policy, kind="waterflow", place=policy, options=options)


def two_streams_elsewhere(cuda_only: str | None) -> list[Entry]:
    """Two streams with the other allocators that there are for torch, each in its own process."""
    settings = {
        "expandable_segments": "expandable_segments:True",
        "cuda_malloc_async": "backend:cudaMallocAsync",
    }
    found = [
        Entry(
            name=f"two_streams_{name}",
            kind="threads",
            place=name,
            # The old name and, for newer torch, the new one.
            environment={"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
            unavailable=cuda_only,
        )
        for name, setting in settings.items()
    ]
    missing = None if importlib.util.find_spec("rmm") else "rmm is not installed"
    why = cuda_only or missing
    rmm = Entry(
        name="two_streams_rmm", kind="threads", place="rmm", first="use_rmm", unavailable=why
    )
    return [*found, rmm]


def ratios(result: dict[str, Any]) -> dict[str, float | None]:
    """The time of each other way over that of waterflow's default policy."""
    others = [name for name in result["contenders"] if name != DEFAULT_POLICY]
    return {name: ratio(result, name, DEFAULT_POLICY) for name in others}


def best(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By model and dtype: every way's samples per second at its best batch, and who is ahead."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        group = found.setdefault(f"{result['model']} {result['dtype']}", {})
        for name, standing in result["contenders"].items():
            speed = standing.get("samples_per_second")
            if speed and speed > group.get(name, {}).get("samples_per_second", 0):
                group[name] = {"samples_per_second": speed, "batch": result["batch"]}
    return found


def title(result: dict[str, Any]) -> str:
    """What was run, in words."""
    return f"{result['model']} {result['dtype']} batch {result['batch']}"


def goals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Never under 0.98 of eager; at the best batches, ahead of everything."""
    rows = [
        goal(f"{title(result)}: two jobs vs eager", result["ratios"].get("eager"), 0.98)
        for result in results
    ]
    for group, ways in best(results).items():
        ours = ways.pop(DEFAULT_POLICY, None)
        for name, way in ways.items():
            value = ours["samples_per_second"] / way["samples_per_second"] if ours else None
            rows.append(goal(f"{group}: best batch of two jobs vs {name}", value, 1.0))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__ or "", seconds=240, repeats=3)
    made.add_argument("--policies", type=names, default=[DEFAULT_POLICY])
    made.add_argument("--without", type=names, default=[], help="contenders to leave out")
    options = made.parse_args(arguments)
    deadline = begin(options)
    memory = options.memory or ("64MiB" if options.tiny else "48GiB")
    result: dict[str, Any] = {"memory": memory, "cases": []}

    def note(found: dict[str, Any]) -> None:
        found["ratios"] = ratios(found)
        result["cases"].append(found)
        result["best"], result["goals"] = best(result["cases"]), goals(result["cases"])
        keep(result, options)

    cases = options.cases or (TINY_CASES if options.tiny else CASES)
    no_daemon = "two_processes_mps" in options.without
    with mps("cpu" if no_daemon else options.device) as (clients, no_mps):
        everyone = entries(options.device, memory, options.policies, clients, no_mps)
        racing = [entry for entry in everyone if entry.name not in options.without]
        result["not_reached"] = run_cases(
            cases, racing, options, deadline, note, case_seconds=_CASE_SECONDS
        )
    publish(result, options)


if __name__ == "__main__":
    main()
