"""The largest batch that trains under a budget: one job, and two of a kind by each policy.

    python -m benchmarks.gpu.max_batch --json

Found by running, never by estimate: a bisection by runs of two steps, then twenty steps of the
batch found, going down until they are accepted. A straight line through the peaks seen so far only
chooses what to try next. `ratio` is the largest batch of two jobs over that of one, beside
Waterwave's (Table 1, V100 32 GB and P100 16 GB). Each search has a time limit of its own, and says
how far it came: `tested` is whether twenty steps were run, `gap` the distance to the smallest
refused.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import waterflow as wf
from benchmarks.gpu.jobs import Case, make_batches, make_job
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
from benchmarks.gpu.search import Outcome, Search
from benchmarks.gpu.worker import Worker, WorkerError
from waterflow.common.units import parse_bytes

#: Two jobs' largest batch over one's, in Waterwave's Table 1, by model and budget.
PAPER = {
    ("resnet50", "32GiB"): 0.916,
    ("bert_base", "32GiB"): 0.899,
    ("resnet50", "16GiB"): 0.926,
    ("bert_base", "16GiB"): 0.800,
}

#: Where the search of one job's largest batch begins, per GiB of budget.
_GUESS_PER_GIB = {"resnet50": 12.0, "bert_base": 6.0}

_SEARCH_STEPS, _TEST_STEPS = 2, 20

#: What libraries say when they get no memory, in errors that are not OutOfMemoryError.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")


class _Order:
    """A scheduler that notes whose step it was: tells jobs side by side from one after another."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def step(self) -> None:
        self._order.append(self._name)


def attempt(
    case: dict[str, Any], jobs: int, memory: str, policy: str, steps: int
) -> dict[str, Any]:
    """Runs jobs of a case in a budget, in this process; says whether all went well."""
    started = time.perf_counter()
    made = Case(**case)
    try:
        return {**_run(made, jobs, memory, policy, steps), "seconds": time.perf_counter() - started}
    except (wf.BudgetError, torch.OutOfMemoryError) as error:
        return {"accepted": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_MEMORY):
            raise
        return {"accepted": False, "why": str(error)[:200]}
    finally:
        make_batches.cache_clear()
        gc.collect()
        if made.device != "cpu":
            torch.cuda.empty_cache()


def _run(case: Case, jobs: int, memory: str, policy: str, steps: int) -> dict[str, Any]:
    order: list[str] = []
    data = [batch for _ in range(steps) for batch in make_batches(case, 2)]
    made = [
        make_job(case, name, seed=i, data=data, steps=steps, scheduler=_Order(name, order))
        for i, name in enumerate([f"job-{i}" for i in range(jobs)])
    ]
    retries = _native_retries(case.device)
    report = wf.run(made, memory, device=case.device, policy=policy, progress=False)
    retries = _native_retries(case.device) - retries + int(getattr(report, "retries", 0) or 0)
    found = {"peak_bytes": report.peak_bytes, "retries": retries}
    for job in report:
        if job.state == "failed":
            raise RuntimeError(f"{job.name}: {job.error_type}: {job.error}")
        if job.state != "finished" or job.steps != steps:
            return {**found, "accepted": False, "why": f"{job.name}: {job.state} {job.error}"}
    if not side_by_side(order):
        return {**found, "accepted": False, "why": "one job waited for the other's end"}
    return {**found, "accepted": retries == 0, "why": "it took retries" if retries else None}


def side_by_side(order: list[str]) -> bool:
    """Whether every job had begun before any had ended, by whose step came when."""
    begun = max(order.index(name) for name in set(order))
    ended = min(len(order) - 1 - order[::-1].index(name) for name in set(order))
    return begun <= ended


def _native_retries(device: str) -> int:
    """How often torch's own allocator has given back its cache and tried again."""
    if device == "cpu":
        return 0
    try:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    except RuntimeError:  # an allocator that keeps no statistics
        return 0


def find(
    case: Callable[[int], Case],
    jobs: int,
    memory: str,
    policy: str,
    guess: int,
    worker: list[Worker],
    seconds: float,
) -> dict[str, Any]:
    """One search, for so many seconds; the process in `worker` is replaced when it dies."""
    deadline = time.monotonic() + seconds

    def tried(batch: int, steps: int) -> Outcome:
        if not worker[0].alive:
            worker[0] = Worker()
        arguments = {"jobs": jobs, "memory": memory, "policy": policy, "steps": steps}
        found = worker[0].call(
            "benchmarks.gpu.max_batch:attempt",
            max(5.0, deadline + 20 - time.monotonic()),
            case=case(batch).as_dict(),
            **arguments,
        )
        accepted = found.pop("accepted")
        return Outcome(batch, steps, accepted, found.pop("peak_bytes", None), found)

    search = Search(tried, guess, parse_bytes(memory), deadline, _SEARCH_STEPS, _TEST_STEPS)
    try:
        search.run()
    except WorkerError as error:
        search.stopped_by = f"{error.kind}: {str(error)[:300]}"
        worker[0].end()  # nobody knows what state it is in
    return {**_as_dict(search), "seconds": time.monotonic() - deadline + seconds}


def _as_dict(search: Search) -> dict[str, Any]:
    return {
        "batch": search.batch,
        "tested": search.tested,
        "gap": None if search.refused is None else search.refused - search.accepted,
        "stopped_by": search.stopped_by,
        "tries": [asdict(outcome) for outcome in search.outcomes],
    }


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The default policy's ratios against Waterwave's."""
    return [
        goal(
            f"{row['model']} in {row['memory']}: largest batch, two jobs over one",
            row["ratio"],
            PAPER.get((row["model"], row["memory"]), 0.8),
        )
        for row in rows
        if row["policy"] == DEFAULT_POLICY
    ]


def _searches(options: Any) -> list[tuple[str, str, str | None]]:
    """(model, memory, policy), the goals' first; no policy means one job alone."""
    pairs = [(model, memory) for memory in options.budgets for model in options.models]
    first, *others = policies(options.policies)
    searches: list[tuple[str, str, str | None]] = []
    for model, memory in pairs:
        searches += [(model, memory, None), (model, memory, first)]
    return searches + [(m, memory, policy) for policy in others for m, memory in pairs]


def _search_all(options: Any, deadline: float, result: dict[str, Any]) -> None:
    solo: dict[tuple[str, str], int | None] = {}
    worker = [Worker()]
    searches = _searches(options)
    for number, (model, memory, policy) in enumerate(searches):
        # What earlier searches left of their time goes to the later ones.
        share = (deadline - time.monotonic()) / (len(searches) - number)
        left = min(deadline - time.monotonic(), max(options.search_seconds, share))
        alone = solo.get((model, memory))
        if left < 1 or (policy is not None and not alone):
            result["not_reached"].append([model, memory, policy or "alone"])
            continue
        default = (
            16.0 if options.tiny else _GUESS_PER_GIB.get(model, 4.0) * parse_bytes(memory) / 2**30
        )
        guess = default if alone is None else 0.94 * alone

        def case(batch: int, model: str = model) -> Case:
            return Case(model=model, batch=batch, device=options.device, tiny=options.tiny)

        jobs, by = (1, DEFAULT_POLICY) if policy is None else (2, policy)
        found = find(case, jobs, memory, by, max(2, int(guess)), worker, left)
        if policy is None:
            solo[model, memory] = found["batch"]
            result["solo"].append({"model": model, "memory": memory, **found})
        else:
            result["pairs"].append(_row(model, memory, policy, alone, found))
        result["goals"] = goals(result["pairs"])
        keep(result, options)
    worker[0].close()


def _row(
    model: str, memory: str, policy: str, alone: int | None, found: dict[str, Any]
) -> dict[str, Any]:
    ratio = found["batch"] / alone if found["batch"] and alone else None
    return {
        "model": model,
        "memory": memory,
        "policy": policy,
        "solo": alone,
        "co": found["batch"],
        "ratio": ratio,
        "paper_ratio": PAPER.get((model, memory)),
        **found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__ or "", seconds=240, repeats=1)
    made.add_argument("--budgets", type=names, help="such as 32GiB,16GiB")
    made.add_argument("--models", type=names, default=["resnet50", "bert_base"])
    made.add_argument("--policies", type=names, help="all of them unless given")
    made.add_argument("--search-seconds", type=float, default=45.0, help="at least, for each")
    options = made.parse_args(arguments)
    deadline = begin(options)
    options.budgets = options.budgets or (["4MiB"] if options.tiny else ["32GiB", "16GiB"])
    result: dict[str, Any] = {"solo": [], "pairs": [], "not_reached": [], "goals": []}
    _search_all(options, deadline, result)
    publish(result, options)


if __name__ == "__main__":
    main()
