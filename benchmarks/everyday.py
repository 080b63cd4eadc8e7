"""What people run every day, beside their plain loops: no list of jobs may be slower by more than
5 % and 20 ms a job.

    python -m benchmarks.everyday
    python -m benchmarks.everyday --json --only workers arrays --jobs 8

Each row is some jobs of one kind on scikit-learn's digits, of 10 to 400 steps of 0.3 to 8 ms: the
plain loops one after another with one thread, and `wf.run`, start-up included, in turn. `over` is
the time of `wf.run` in parts of what the rule allows; numbers are compared by bits.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from benchmarks.trials.digits import classify, cnn, digits

MEMORY = "2GiB"
#: What a list of jobs may take beyond its loops: a part of them, and seconds for each job.
PART, SECONDS_EACH = 0.05, 0.02

Make = Callable[[int], wf.Job]


def mlp(width: int = 64, depth: int = 2, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(8, 32, batch_first=True)
        self.last = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.rows(images.view(-1, 8, 8))[0][:, -1])  # type: ignore[no-any-return]


class Asks(nn.Module):
    """Asks for the value of a tensor in each step, which no captured step can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.first(images))
        if hidden.mean().item() > 1e9:
            hidden = hidden / hidden.mean()
        return self.last(hidden)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Has a number that callbacks change."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.scale = mlp(), 1.0

    def forward(self, images: Tensor) -> Tensor:
        return self.within(images) * self.scale  # type: ignore[no-any-return]


def of_arrays(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, [*map(torch.as_tensor, batch)])


def of_dicts(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def accuracy(model: nn.Module) -> dict[str, float]:
    images, labels = digits().tensors
    return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}


def rows(size: int = 32, batches: int = 30) -> list[tuple[Tensor, Tensor]]:
    """Views of the one data set, as lists of trials have them."""
    images, labels = digits().tensors
    return [(images[a : a + size], labels[a : a + size]) for a in range(0, size * batches, size)]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits().tensors), batch_size=64, shuffle=True, **options)


def bert() -> nn.Module:
    """A small one of transformers' own, on images as 64 words of 17."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=17, num_labels=10, intermediate_size=64, **sizes)
    )


def words() -> list[dict[str, Tensor]]:
    return [{"input_ids": (x * 16).long(), "labels": y} for x, y in rows(size=8)]


def of_words(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


class Lengths:
    """Batches of so many different lengths."""

    def __init__(self, lengths: int) -> None:
        self._lengths = lengths

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = digits().tensors
        draw = random.Random(3)
        while True:
            size = draw.randrange(8, 8 + self._lengths)
            yield images[:size], labels[:size]


def job(
    number: int,
    model: Callable[[], nn.Module] = mlp,
    data: Callable[[], Any] = rows,
    steps: int | None = 300,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[..., Any] = classify,
    **options: Any,
) -> wf.Job:
    torch.manual_seed(number)
    made = model()
    make = optimizer or functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return wf.Job(
        f"job-{number}",
        model=made,
        optimizer=make(made.parameters()),
        loss=loss,
        data=data(),
        steps=steps,
        seed=number,
        **options,
    )


def with_rates_by_hand(number: int) -> wf.Job:
    made = job(number, steps=200)

    def lower(step: wf.StepResult) -> None:
        for group in made.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step.step)

    made.on_step = lower
    return made


def with_a_number_that_changes(number: int) -> wf.Job:
    made = job(number, Scaled, steps=200)

    def change(step: wf.StepResult) -> None:
        made.model.scale = 1.0 / (1 + step.step // 20)

    made.on_step = change
    return made


def with_a_step_of_its_own(number: int) -> wf.Job:
    torch.manual_seed(number)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return wf.Job(
        f"job-{number}",
        model=model,
        optimizer=optimizer,
        step=step,
        data=rows(),
        steps=300,
        seed=number,
    )


def stops_early(step: wf.StepResult) -> Any:
    return wf.STOP if step.step >= 60 else None


def nothing(step: wf.StepResult) -> None:
    """A callback."""


def kinds() -> dict[str, Make]:
    """What jobs there are, by name."""
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    shuffled = {"model": functools.partial(mlp, dropout=0.1), "data": loader, "optimizer": adam}
    large = {"model": functools.partial(mlp, 512, 3), "steps": 60, "optimizer": adam}
    lbfgs = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=4)

    def kind(**options: Any) -> Make:
        return functools.partial(job, **options)

    return {
        "lists": kind(steps=400),
        "never_captured": kind(steps=400, capture=False),
        "callback": kind(steps=400, on_step=nothing),
        "loader": kind(**shuffled, on_step=nothing),
        "loader_never_captured": kind(**shuffled, capture=False),
        "opaque": kind(model=Asks),
        "opaque_callback": kind(model=Asks, on_step=nothing),
        "own_step": with_a_step_of_its_own,
        "rates_by_hand": with_rates_by_hand,
        "changing_number": with_a_number_that_changes,
        "evaluated": kind(steps=None, epochs=8, evaluate=accuracy),
        "stopped_early": kind(steps=1000, on_step=stops_early),
        "short": lambda n: job(n, functools.partial(mlp, 32 + n), steps=10),
        "middling": lambda n: job(n, functools.partial(mlp, 32 + n), steps=50),
        "lengths_5": kind(data=functools.partial(Lengths, 5), steps=200),
        "lengths_60": kind(data=functools.partial(Lengths, 60), steps=200),
        "arrays": kind(
            data=lambda: [tuple(part.numpy() for part in batch) for batch in rows()],
            loss=of_arrays,
            steps=200,
        ),
        "dicts": kind(
            data=lambda: [{"images": a, "labels": b, "id": "x"} for a, b in rows()], loss=of_dicts
        ),
        "workers": kind(data=functools.partial(loader, num_workers=1), steps=56),
        "cnn": kind(model=cnn, data=functools.partial(rows, 64, 20), steps=60, optimizer=adam),
        "recurrent": kind(model=Recurrent, steps=100),
        "transformers": kind(model=bert, data=words, loss=of_words, steps=60, optimizer=adam),
        "lbfgs": kind(steps=20, optimizer=lbfgs),
        "large": kind(**large),
        "large_never_captured": kind(**large, capture=False),
    }


@dataclass(frozen=True)
class Row:
    """Seconds of the loops and of `wf.run`, medians; `over` above 1 breaks the rule."""

    kind: str
    jobs: int
    loop_seconds: float
    waterflow_seconds: float
    over: float
    equal: bool


def measure(kind: str, make: Make, jobs: int, repeats: int) -> Row:
    loops, runs, equal = [], [], True
    for _ in range(repeats):
        made = [make(number) for number in range(jobs)]
        gc.collect()  # what ran before has left garbage
        started = time.perf_counter()
        expected = [wf.run_eager(each, threads=1).losses for each in made]
        loops.append(time.perf_counter() - started)
        made = [make(number) for number in range(jobs)]
        gc.collect()
        started = time.perf_counter()
        report = wf.run(made, memory=MEMORY)
        runs.append(time.perf_counter() - started)
        equal = equal and [found.losses for found in report] == expected
    loop, run = statistics.median(loops), statistics.median(runs)
    allowed = (1 + PART) * loop + SECONDS_EACH * jobs
    return Row(kind, jobs, round(loop, 3), round(run, 3), round(run / allowed, 2), equal)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Jobs as people run them, beside their loops.")
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--only", nargs="*", choices=kinds(), default=None, help="kinds of jobs")
    parser.add_argument("--jobs", nargs="*", type=int, default=[1, 2, 8], help="how many together")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved runs of each")
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    wf.run([job(0, steps=60)], memory=MEMORY)  # imports
    found = []
    for name, make in kinds().items():
        if options.only is not None and name not in options.only:
            continue
        for jobs in options.jobs:
            row = measure(name, make, jobs, options.repeats)
            found.append(row)
            if not options.json:
                slow = "  OVER" if row.over > 1 else ""
                print(
                    f"{name:22} {jobs:3}  loop {row.loop_seconds:7.3f} s  waterflow "
                    f"{row.waterflow_seconds:7.3f} s  of what is allowed {row.over:5.2f}{slow}"
                    f"{'' if row.equal else '  OTHER NUMBERS'}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": [vars(row) for row in found]}))


if __name__ == "__main__":
    main()
