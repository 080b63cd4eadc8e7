"""Co-trained jobs against themselves alone and in the plain loop: bit by bit, 50 steps, on the GPU.

    python -m benchmarks.gpu.equality --json

Four jobs with dropout and batch norm among them, under deterministic algorithms. Their losses and
their weights afterwards must be the same bits under every policy, alone (`solo`) and by
`wf.run_eager` (`eager`), which is the reference. `equal: false` comes with the first step that
differs, and makes the program end with 1.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# Read by cuBLAS when it is first used: a workspace of its own for each stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import waterflow as wf
from benchmarks.gpu.jobs import Case, make_job
from benchmarks.gpu.options import begin, goal, keep, names, parser, policies, publish

#: Name, model, batch, dtype, tiny.
JOBS = [
    ("bert_base", "bert_base", 4, "fp32", False),
    ("bert_tiny_bf16", "bert_base", 8, "bf16", True),
    ("resnet50", "resnet50", 4, "fp32", False),
    ("lstm", "lstm", 8, "fp32", False),
]

Losses = dict[str, list[float]]
Digests = dict[str, str]


def make_jobs(options: Any) -> list[wf.Job]:
    """All jobs, made anew: the same ones each time."""
    return [
        make_job(
            Case(
                model=model,
                batch=batch,
                dtype=dtype,
                device=options.device,
                tiny=tiny or options.tiny,
            ),
            name,
            seed=seed,
            steps=options.steps,
        )
        for seed, (name, model, batch, dtype, tiny) in enumerate(JOBS)
        if options.jobs is None or name in options.jobs
    ]


def digest(job: wf.Job) -> str:
    """The bits of all weights and buffers, in short."""
    found = hashlib.blake2b()
    for tensor in job.model.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def eager(options: Any) -> tuple[Losses, Digests]:
    """The reference: every job in the plain loop."""
    losses, digests = {}, {}
    for job in make_jobs(options):
        losses[job.name] = wf.run_eager(job, threads=1).losses
        digests[job.name] = digest(job)
    return losses, digests


def flowing(options: Any, policy: str, alone: bool) -> tuple[Losses, Digests]:
    """All jobs by waterflow, each in a run of its own or all in one."""
    jobs = make_jobs(options)
    losses, digests = {}, {}
    for group in [[job] for job in jobs] if alone else [jobs]:
        report = wf.run(
            group, options.memory, device=options.device, policy=policy, threads=1, progress=False
        )
        for job in group:
            if not report[job.name].ok:
                raise RuntimeError(f"{job.name}: {report[job.name].error}")
            losses[job.name], digests[job.name] = report[job.name].losses, digest(job)
    return losses, digests


def compare(found: tuple[Losses, Digests], wanted: tuple[Losses, Digests]) -> dict[str, Any]:
    """By job: whether all is equal, and the first step (from 1) whose loss differs."""
    jobs = {}
    for name, losses in wanted[0].items():
        # By bits, not by value: NaN equals itself, 0.0 and -0.0 differ.
        ours, theirs = ([value.hex() for value in part] for part in (found[0][name], losses))
        steps = enumerate(zip(ours, theirs, strict=False), 1)
        first = next((step for step, (a, b) in steps if a != b), None)
        weights = found[1][name] == wanted[1][name]
        equal = first is None and len(ours) == len(theirs) and weights
        jobs[name] = {"equal": equal, "first_differing_step": first, "equal_weights": weights}
    return {"equal": all(job["equal"] for job in jobs.values()), "jobs": jobs}


def be_deterministic(strictly: bool) -> None:
    """Deterministic algorithms in all libraries; where there is none, an error or a warning."""
    torch.use_deterministic_algorithms(True, warn_only=not strictly)
    torch.backends.cudnn.benchmark = False


def reference(options: Any, result: dict[str, Any]) -> tuple[Losses, Digests]:
    """The plain loop's numbers, twice: unequal to itself, it could not tell anything."""
    be_deterministic(strictly=True)
    try:
        wanted = eager(options)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        result["not_deterministic"] = str(error)[:200]
        be_deterministic(strictly=False)
        wanted = eager(options)
    result["eager_again"] = compare(eager(options), wanted)
    return wanted


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__ or "", seconds=150, repeats=1)
    made.add_argument("--policies", type=names, help="all of them unless given")
    made.add_argument("--jobs", type=names, help="all of them unless given")
    made.add_argument("--steps", type=int, default=None)
    options = made.parse_args(arguments)
    deadline = begin(options)
    options.steps = options.steps or (5 if options.tiny else 50)
    options.memory = options.memory or ("64MiB" if options.tiny else "24GiB")
    result: dict[str, Any] = {"steps": options.steps, "memory": options.memory, "not_reached": []}
    wanted = reference(options, result)
    first, *others = policies(options.policies)
    runs = [("solo", first, True), (first, first, False), *((p, p, False) for p in others)]
    for name, policy, alone in runs:
        if time.monotonic() > deadline:
            result["not_reached"].append(name)
            continue
        result[name] = compare(flowing(options, policy, alone), wanted)
        result["equal"] = all(result[run]["equal"] for run, _, _ in runs if run in result)
        result["goals"] = [
            goal(f"{run}: {options.steps} steps equal to eager", result[run]["equal"], True)
            for run, _, _ in runs
            if run in result
        ]
        keep(result, options)
    publish(result, options)
    sys.exit(0 if result.get("equal") else 1)


if __name__ == "__main__":
    main()
