"""Whatever jobs run together, of whatever lengths, and whatever is asked meanwhile: each ends, with
the numbers of its plain loop."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import waterflow as wf
from tests.support.differences import assert_same_numbers

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::waterflow.JobFailedWarning"),
    pytest.mark.filterwarnings("ignore::waterflow.OpaqueStepWarning"),
    pytest.mark.timeout(150, method="thread"),  # one that waits for ever may hold the main thread
]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, 0.01),
}
WANTED = "as wanted"


class Stream(IterableDataset[Any]):
    """Batches of which nobody knows how many there are, each after a pause."""

    def __init__(self, batches: Sequence[Any], pause: float) -> None:
        self._batches, self._pause = batches, pause

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            time.sleep(self._pause)
            yield batch


@dataclass(frozen=True)
class Mixture:
    """Everything that a seed decides about one run."""

    seed: int

    @property
    def _chance(self) -> random.Random:
        return random.Random(self.seed)

    def options(self) -> dict[str, Any]:
        """Of the engine."""
        chance = self._chance
        policy = chance.choice(["flow"] * 4 + ["temporal", "time-slice"])
        options = {
            "policy": policy,
            "memory": chance.choice(["64MiB", "1MiB", "256KiB"]),
            "callbacks": chance.choice(["lane", "lane", "caller"]),
        }
        if policy == "flow":
            options["lanes"] = chance.randint(1, 3)
        if policy == "time-slice":
            options["quantum"] = chance.choice([0.02, 0.2])
        return options

    def jobs(self) -> list[wf.Job]:
        """The same ones each time."""
        chance = self._chance
        flows = self.options()["policy"] == "flow"
        priorities = ["normal"] * 4 + (["guaranteed", "opportunistic"] if flows else [])
        alike = chance.random() < 0.5  # so that their ends come together
        lengths = chance.randint(1, 5), chance.randint(1, 5)
        capture = chance.choice(["auto", True, False, None])
        jobs = []
        for number in range(chance.randint(2, 9)):
            count, epochs = lengths if alike else (chance.randint(1, 6), chance.randint(1, 6))
            job = _job(f"job {number}", chance, count, epochs)
            job.capture = chance.choice(["auto", True, False]) if capture is None else capture
            job.priority = chance.choice(priorities)
            job.weight = chance.choice([1, 1, 3, 0.2])
            jobs.append(job)
        return jobs

    def run(self) -> tuple[list[wf.Job], wf.Report]:
        """Runs them, and asks for this and that meanwhile."""
        jobs, options, chance = self.jobs(), self.options(), self._chance
        if options["callbacks"] == "caller" or chance.random() < 0.5:
            return jobs, wf.run(jobs, threads=1, **options)
        with wf.Engine(threads=1, **options) as engine:
            left = list(jobs)
            handles = [engine.submit(left.pop(0))]
            while left and chance.random() < 0.9:
                handles.append(engine.submit(left.pop(0)))
            for _ in range(chance.randint(3, 25)):
                time.sleep(chance.choice([0, 0.001, 0.003, 0.01, 0.03]))
                with contextlib.suppress(wf.JobError, wf.BudgetError):
                    _ask(engine, chance.choice(handles), chance)
            with contextlib.suppress(wf.BudgetError):
                engine.resize("64MiB")
            for handle in handles:
                with contextlib.suppress(wf.JobError):
                    handle.resume()
            for job in left:
                engine.submit(job)
        return jobs, engine.report()


def _ask(engine: wf.Engine, handle: wf.JobHandle, chance: random.Random) -> None:
    match chance.choice(["suspend", "resume", "resume", "priority", "weight", "resize"]):
        case "suspend":
            handle.suspend()
        case "resume":
            handle.resume()
        case "priority":
            handle.set_priority(chance.choice(["normal", "guaranteed", "opportunistic"]))
        case "weight":
            handle.set_weight(chance.choice([0.3, 2]))
        case "resize":
            engine.resize(chance.choice(["64MiB", "2MiB", "512KiB"]))


def _job(name: str, chance: random.Random, count: int, epochs: int) -> wf.Job:
    seed, width = chance.randrange(1 << 30), chance.choice([4, 4, 5, 6, 7, 8])
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(8, width), nn.ReLU()]
    layers += chance.choice([[], [], [nn.Dropout(0.3)], [nn.BatchNorm1d(width)]])
    model = nn.Sequential(*layers, nn.Linear(width, 3))
    sizes = [chance.choice([4, 8])] * count
    if count > 1 and chance.random() < 0.4:
        sizes[-1] = chance.choice([3, 32, 64])
    inputs, labels = torch.randn(sum(sizes), 8), torch.randint(3, (sum(sizes),))
    batches = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
    data = chance.choice(
        [
            batches,
            DataLoader(TensorDataset(inputs, labels), batch_size=sizes[0], shuffle=True),
            DataLoader(Stream(batches, chance.choice([0, 0.001, 0.005])), batch_size=None),
        ]
    )
    optimizer = OPTIMIZERS[chance.choice(list(OPTIMIZERS))](model.parameters())
    job = wf.Job(name, model=model, optimizer=optimizer, loss=_loss, data=data, seed=seed)
    if chance.random() < 0.7:
        job.epochs = epochs
    else:
        job.epochs, job.steps = None, chance.randint(1, 40)
    if chance.random() < 0.7:
        scratch = chance.choice([[0], [1 << 10, 1 << 14], [1 << 12, 1 << 16, 1 << 18]])
        job.evaluate = _Evaluate(inputs, chance.choice([0, 0, 0.002, 0.02]), scratch)
        job.evaluate_every = chance.choice(["epoch", "epoch", 1, 3])
    if chance.random() < 0.4:
        stop, fail = chance.choice([None, None, 0, 3, 9]), chance.choice([None] * 6 + [2])
        job.on_step = _Callback(stop, fail, chance.choice([0, 0, 0.001, 0.01]))
    if chance.random() < 0.2:
        job.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return job


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class _Evaluate:
    inputs: torch.Tensor
    pause: float
    scratch: list[int]  # floats that one evaluation after another needs beside
    evaluations: int = 0

    def __call__(self, model: nn.Module) -> float:
        time.sleep(self.pause)
        scratch = torch.ones(self.scratch[self.evaluations % len(self.scratch)])
        self.evaluations += 1
        return float(model(self.inputs).sum() + scratch.sum())


@dataclass
class _Callback:
    stop: int | None
    fail: int | None
    pause: float

    def __call__(self, result: wf.StepResult) -> Any:
        time.sleep(self.pause)
        if result.step == self.fail:
            raise ValueError(WANTED)
        return wf.STOP if self.stop is not None and result.step >= self.stop else None


def check(seed: int) -> None:
    mixture = Mixture(seed)
    jobs, report = mixture.run()
    for job, reference in zip(jobs, mixture.jobs(), strict=True):
        found = report[job.name]
        if found.error_type == "OutOfMemoryError":  # the plain loop knows no budget
            continue
        failed = None
        try:
            alone = wf.run_eager(reference, threads=1)
        except ValueError as error:
            failed = str(error)
        assert found.error == failed
        if failed is not None:
            continue
        assert_same_numbers(reference, alone, job, found)
        expected = [evaluation.values for evaluation in alone.evaluations]
        assert [evaluation.values for evaluation in found.evaluations] == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_few_mixtures(seed: int) -> None:
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_mixtures(seed: int) -> None:
    check(seed)
