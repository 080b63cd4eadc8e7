"""Cost of being sure: the account of Python state before each step, and the spot checks.

    python -m benchmarks.audit --json

Each model trains alone, one intra-op thread. `account_us` is the look before a step,
`account_take_ms` taking the account, `step_ms` a captured step, `check_ms` a checked one.
`checks_per_1000` and `checks_share` are what the schedule of checks makes of these numbers in
1,000 steps, which are not run (`extrapolated`); the share is of the time of those steps.
`opaque_beside_captured` is how much faster an opaque and a captured job are beside each other
than one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.common import arguments, interleaved, median_ratio, show
from waterflow.account.purity import observer
from waterflow.capture.assumptions import Assumptions
from waterflow.capture.caller import CallerContext
from waterflow.job.training_step import eager_step
from waterflow.models.bert import BERT_BASE
from waterflow.models.resnet import RESNET50
from waterflow.steps.check_schedule import CheckSchedule

MEMORY = "12GiB"
#: Looks at an account, and takings of it, of which the median is told.
LOOKS, TAKINGS = 200, 5
#: Steps run for one time of a step; the first ones capture and settle.
STEPS, SETTLED = 12, 4
SCHEDULED = 1000
#: Two jobs beside each other, each of about 5 ms of kernels a step.
PAIR_STEPS, PAIR_WIDTH, PAIR_LAYERS, PAIR_BATCH = 60, 512, 3, 128


def mlp() -> tuple[nn.Module, Any]:
    layers = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64)


def cnn() -> tuple[nn.Module, Any]:
    parts: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        parts += [nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)]
    return nn.Sequential(*parts, *head), torch.randn(16, 3, 32, 32)


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(model, nn.Flatten(1), nn.Linear(32 * 128, 10)), torch.randn(8, 32, 128)


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def classifier_job(make: Callable[[], tuple[nn.Module, Any]]) -> wf.Job:
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = x, torch.randint(10, (len(x),))
    return wf.Job("model", model=model, optimizer=optimizer, loss=classify, data=[batch], seed=0)


def zoo_job(task: Any, size: int) -> wf.Job:
    torch.manual_seed(0)
    model = task.model()
    optimizer, data = task.optimizer(model.parameters()), [task.batch(size)]
    return wf.Job("model", model=model, optimizer=optimizer, loss=task.loss, data=data, seed=0)


MODELS: Mapping[str, Callable[[], wf.Job]] = {
    "mlp": lambda: classifier_job(mlp),
    "cnn": lambda: classifier_job(cnn),
    "encoder": lambda: classifier_job(encoder),
    "resnet50": lambda: zoo_job(RESNET50, 2),
    "bert_base": lambda: zoo_job(BERT_BASE, 2),
}


class Timed:
    """One batch again and again; `times` has when each was asked for."""

    def __init__(self, batch: Any, steps: int) -> None:
        self._batch, self._steps = batch, steps
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._steps):
            self.times.append(time.perf_counter())
            yield self._batch


def step_seconds(make: Callable[[], wf.Job], audit: str) -> float:
    """The median time of a step that is captured ("off") or checked ("all")."""
    job = make()
    job.data = timed = Timed(next(iter(job.data)), STEPS)
    (report,) = wf.run([job], memory=MEMORY, policy="temporal", threads=1, audit=audit)
    assert report.captured == "captured", (report.error, report.notes)
    pairs = zip(timed.times[SETTLED:], timed.times[SETTLED + 1 :], strict=False)
    return statistics.median(after - before for before, after in pairs)


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def account_seconds(job: wf.Job) -> tuple[float, float]:
    """The median times of a look at the account of a job that has trained, and of taking it."""
    batch, caller = next(iter(job.data)), CallerContext()
    eager_step(job, batch)
    assumptions = Assumptions(job, caller)
    with observer() as seen:
        eager_step(job, batch)
    job.optimizer.zero_grad()
    problem = assumptions.difference() or assumptions.narrow(seen)
    assert problem is None, problem
    assert assumptions.hold()
    taking = seconds_of(lambda: Assumptions(job, caller), TAKINGS)
    return seconds_of(assumptions.hold, LOOKS), taking


def scheduled_checks(step: float, check: float, graphs: int) -> int:
    """Checks in 1,000 steps, where each of the first steps uses another graph."""
    schedule, checks = CheckSchedule("log"), 0
    with mock.patch("waterflow.steps.check_schedule.time.perf_counter") as clock:
        for number in range(1, SCHEDULED + 1):
            if number <= graphs or schedule.is_due(number, step):
                checks += 1
                clock.side_effect = [0.0, check]
                with schedule.timed(number):
                    pass
    return checks


def row_of(name: str, make: Callable[[], wf.Job], repeats: int) -> dict[str, object]:
    step_seconds(make, "off")  # profiles are cached from here on
    found = interleaved(
        {audit: lambda audit=audit: step_seconds(make, audit) for audit in ("off", "all")},  # type: ignore[misc]
        repeats,
    )
    step, check = (statistics.median(found[audit]) for audit in ("off", "all"))
    look, taking = account_seconds(make())
    checks = scheduled_checks(step, check, graphs=2)
    return {
        "model": name,
        "account_us": 1e6 * look,
        "account_take_ms": 1e3 * taking,
        "step_ms": 1e3 * step,
        "check_ms": 1e3 * check,
        "checks_per_1000": checks,
        "checks_share": checks * max(0.0, check - step) / (SCHEDULED * step),
        "extrapolated": True,
    }


# An opaque job beside a captured one


def pair_job(name: str, capture: bool | str) -> wf.Job:
    torch.manual_seed(0)
    layers = [nn.Linear(PAIR_WIDTH, PAIR_WIDTH) for _ in range(PAIR_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(PAIR_BATCH, PAIR_WIDTH), torch.randint(PAIR_WIDTH, (PAIR_BATCH,))
    return wf.Job(
        name,
        model=model,
        optimizer=optimizer,
        loss=classify,
        data=[batch] * PAIR_STEPS,
        seed=0,
        capture=capture,  # type: ignore[arg-type]
    )


def pair_seconds(**captures: bool | str) -> float:
    jobs = [pair_job(name, capture) for name, capture in captures.items()]
    report = wf.run(jobs, memory="256MiB", policy="flow", threads=1)
    assert report.ok, [job.error for job in report]
    return report.seconds


def beside(repeats: int) -> dict[str, object]:
    measures = {
        "opaque": lambda: pair_seconds(opaque=False),
        "captured": lambda: pair_seconds(captured="auto"),
        "both": lambda: pair_seconds(opaque=False, captured="auto"),
    }
    interleaved(measures, 1)  # profiles are cached from here on
    found = interleaved(measures, repeats)
    apart = [a + b for a, b in zip(found["opaque"], found["captured"], strict=True)]
    return {
        "opaque_step_ms": 1e3 * statistics.median(found["opaque"]) / PAIR_STEPS,
        "captured_step_ms": 1e3 * statistics.median(found["captured"]) / PAIR_STEPS,
        "opaque_beside_captured": median_ratio(apart, found["both"]),
    }


def main() -> None:
    options = arguments(__doc__ or "", repeats=3)
    torch.set_num_threads(1)
    rows = [row_of(name, make, options.repeats) for name, make in MODELS.items()]
    result: dict[str, object] = {"rows": rows, **beside(options.repeats)}
    if options.json:
        show(result, True)
        return
    for row in rows:
        show(row, False)
    show({key: value for key, value in result.items() if key != "rows"}, False)


if __name__ == "__main__":
    main()
