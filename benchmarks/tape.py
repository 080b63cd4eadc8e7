"""A captured step beside the eager one: one job alone, one lane, all threads.

    python -m benchmarks.tape --json
    python -m benchmarks.tape --models lstm --batches 16 --threads 1

Per model and batch the median time of a step from callback to callback, once captured and warm, in
runs that take turns with the plain loop's; a ratio above 1 means that the tape is faster. Counted
with it: the operators of the step. On a machine with other work `--threads 1` is the one to trust:
two threads that wait for each other are as slow as the one that waits for its core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.common import show
from waterflow.models.bert import Bert, BertConfig, masked_language_loss, masked_text
from waterflow.models.lstm import language_model

Batch = tuple[torch.Tensor, torch.Tensor]
Parts = tuple[nn.Module, torch.optim.Optimizer, Batch]

#: Steps that are not measured: the first ones, which are captured, checked, and cold.
WARM_UP = 8


class Block(nn.Module):
    """ResNet's basic block (He et al., 2016), for images of 32 x 32."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = channels == width and stride == 1
        projection = (nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Sequential(*(() if same else projection))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def images(count: int) -> Batch:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def text(count: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (count, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def cnn(count: int) -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), images(count)


def resnet18(count: int) -> Parts:
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    strides = (1, 1, 2, 1, 2, 1, 2, 1)
    channels = (64, *widths)
    blocks = [Block(*sizes) for sizes in zip(channels, widths, strides, strict=False)]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    model = nn.Sequential(*stem, *blocks, *head)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), images(count)


def transformer(count: int) -> Parts:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    model = nn.Sequential(nn.Embedding(256, 128), encoder, nn.Linear(128, 256))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), text(count, 64, 256)


def bert(count: int) -> Parts:
    sizes = {"width": 128, "layers": 2, "heads": 2, "inner": 512, "positions": 64}
    model = Bert(BertConfig(vocabulary=1000, **sizes))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4), masked_text(count, 32, 1000)


def lstm(count: int) -> Parts:
    model = language_model(500, 64, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), text(count, 16, 500)


def mlp(count: int) -> Parts:
    """Many small parameters: what there is to an optimizer's update is launching it."""
    layers = [part for _ in range(64) for part in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(count, 16), torch.randint(4, (count,)))


MODELS: dict[str, Callable[[int], Parts]] = {
    made.__name__: made for made in (cnn, transformer, bert, resnet18, lstm, mlp)
}


def classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def step_times(
    name: str, batch: int, steps: int, run: Callable[[wf.Job], object], seconds: float
) -> list[float]:
    """Seconds of each step after the first ones, until the time is over."""
    stamps: list[float] = []

    def on_step(result: wf.StepResult) -> object:
        stamps.append(time.perf_counter())
        over = len(stamps) > WARM_UP + 4 and stamps[-1] - stamps[WARM_UP] > seconds
        return wf.STOP if over else None

    torch.manual_seed(0)
    model, optimizer, data = MODELS[name](batch)
    loss = masked_language_loss if name == "bert" else classes
    run(
        wf.Job(
            name,
            model=model,
            optimizer=optimizer,
            loss=loss,
            data=[data],
            steps=WARM_UP + steps,
            seed=0,
            on_step=on_step,
            capture=True,
            audit="off",
        )
    )
    return [after - before for before, after in itertools.pairwise(stamps[WARM_UP:])]


def measure(name: str, batch: int, options: argparse.Namespace) -> dict[str, object]:
    threads = options.threads

    def tape(job: wf.Job) -> None:
        report = wf.run([job], memory="8GiB", lanes=1, threads=threads)
        assert report.ok, [entry.error for entry in report]

    eager_medians, tape_medians, ratios = [], [], []
    for _ in range(options.repeats):
        eager = step_times(
            name, batch, options.steps, lambda job: wf.run_eager(job, threads), options.seconds
        )
        taped = step_times(name, batch, options.steps, tape, options.seconds)
        eager_medians.append(statistics.median(eager))
        tape_medians.append(statistics.median(taped))
        ratios.append(eager_medians[-1] / tape_medians[-1])
    return {
        "model": name,
        "batch": batch,
        "eager_ms": round(1e3 * statistics.median(eager_medians), 3),
        "tape_ms": round(1e3 * statistics.median(tape_medians), 3),
        "ratio": round(statistics.median(ratios), 3),
        "operators": count_operators(name, batch),
    }


def count_operators(name: str, batch: int) -> int:
    """Instructions of the captured step."""
    from waterflow.executor.device.host import HostDevice
    from waterflow.executor.run.rng import JobRng
    from waterflow.job.training_step import eager_step
    from waterflow.steps.job_steps import JobSteps

    model, optimizer, data = MODELS[name](batch)
    loss = masked_language_loss if name == "bert" else classes
    job = wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=[data])
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    found = None
    while found is None:  # a step that has to be observed first is made
        found = steps.preparer.prepare(data).specialization
        if found is None:
            eager_step(job, data)
    assert found.steady is not None
    return len(found.steady.compiled.tape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line, nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5, help="interleaved runs of each")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a run at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="after so long a run ends")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for batch in options.batches:
            rows.append(measure(name, batch, options))
            if not options.json:
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        show({"rows": rows, "threads": options.threads}, as_json=True)


if __name__ == "__main__":
    main()
