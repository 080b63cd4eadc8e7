"""The largest batches of jobs trained together, beside those that Waterwave measured.

    python -m benchmarks.max_batch --json                          the whole table
    python -m benchmarks.max_batch --only resnet50 bert_base       some models

Nothing is trained: steps are captured without memory and the allocator decides on virtual
addresses (`waterflow.max_batch`). Its numbers (Waterwave, Tables 1 and 2, section 5.5) were
measured on a V100 with 32 GB and a P100 with 16 GB. `ratio` is the batch together over the batch
alone, in the mean over the jobs; `bound` what the persistent bytes of all jobs leave of the memory,
over what those of one leave, of the job that it bounds most: batches keep their proportion, so no
policy can be far above it. One row per model, memory and policy.
Tacotron 2 takes some minutes the first time: its step has 80,000 nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import waterflow as wf
from waterflow.common.units import parse_bytes
from waterflow.study.hardware import get_hardware
from waterflow.study.job_specs import study_jobs
from waterflow.study.results import CoTrained, MaxBatch

#: model -> memory -> (solo, waterwave-s, waterwave) by Waterwave (Table 1), two identical jobs.
PAPER = {
    "resnet50": {"32GiB": (406, 266, 370), "16GiB": (190, 120, 176)},
    "resnet152": {"32GiB": (186, 118, 160), "16GiB": (86, 62, 78)},
    "nasnet_mobile": {"32GiB": (560, 316, 544), "16GiB": (280, 192, 260)},
    "inception_v3": {"32GiB": (332, 204, 310), "16GiB": (160, 106, 150)},
    "bert_base": {"32GiB": (138, 88, 124), "16GiB": (60, 38, 48)},
    "tacotron2": {"32GiB": (198, 96, 152), "16GiB": (98, 48, 72)},
}
#: Jobs of different models, 32 GB: what Waterwave trained together.
MIXED = {
    ("resnet50", "bert_base"): (358, 116),
    ("resnet50", "tacotron2"): (370, 150),
    ("bert_base", "tacotron2"): (120, 150),
}
#: So many ResNet-50, 32 GB.
MANY = {3: 336, 4: 310}


@dataclass(frozen=True)
class Case:
    models: tuple[str, ...]
    memory: str
    paper: dict[str, float]  # policy -> ratio

    @property
    def label(self) -> str:
        first = self.models[0]
        if set(self.models) == {first}:
            return first if len(self.models) == 2 else f"{len(self.models)} x {first}"
        return "+".join(self.models)


def cases() -> Iterator[Case]:
    for model, memories in PAPER.items():
        for memory, (solo, two_groups, waterwave) in memories.items():
            ratios = {"waterwave-s": two_groups / solo, "waterwave": waterwave / solo}
            yield Case((model, model), memory, ratios)
    for models, batches in MIXED.items():
        alone = [PAPER[model]["32GiB"][0] for model in models]
        shares = [batch / solo for batch, solo in zip(batches, alone, strict=True)]
        yield Case(models, "32GiB", {"waterwave": sum(shares) / len(shares)})
    for count, batch in MANY.items():
        ratio = batch / PAPER["resnet50"]["32GiB"][0]
        yield Case(("resnet50",) * count, "32GiB", {"waterwave": ratio})


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    found = wf.max_batch(case.models, case.memory, hardware="v100")
    bound = bound_of(case)
    for policy, best in found.policies.items():
        yield row_of(case, found, policy, best, bound)


def row_of(
    case: Case, found: MaxBatch, policy: str, best: CoTrained | None, bound: float
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": case.label,
        "memory": case.memory,
        "policy": policy,
        "solo": list(found.solo),
        "co": None if best is None else list(best.batch),
        "ratio": None if best is None else best.ratio,
        "bound": bound,
        "paper_ratio": case.paper.get(policy),
    }
    if best is not None:
        row["peak_bytes"] = best.outlook.peak_bytes
        row["simulated_overlap"] = best.outlook.overlap
        row["simulated_speedup"] = best.outlook.speedup
    return row


def bound_of(case: Case) -> float:
    """What is left beside all persistent bytes, over what is left beside one job's: the least."""
    memory = parse_bytes(case.memory)
    held = [
        job.sized_job(2).persistent_bytes for job in study_jobs(case.models, get_hardware("v100"))
    ]
    return min((memory - sum(held)) / (memory - own) for own in held)


def show(row: dict[str, Any]) -> None:
    together = "-" if row["co"] is None else "+".join(map(str, row["co"]))
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.1%}"
    paper = "-" if row["paper_ratio"] is None else f"{row['paper_ratio']:.1%}"
    print(
        f"{row['model']:22} {row['memory']:6} {row['policy']:12} alone "
        f"{'+'.join(map(str, row['solo'])):18} together {together:18} {ratio:>7}  "
        f"bound {row['bound']:.1%}  paper {paper:>6}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--only", nargs="*", metavar="MODEL", help="cases of these models alone")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases():
        if options.only and not set(case.models) <= set(options.only):
            continue
        for row in rows_of(case):
            rows.append(row)
            show(row)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
