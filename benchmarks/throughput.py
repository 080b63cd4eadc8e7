"""Throughput of compute-bound jobs: never slower than the plain loop, alone or together.

    python -m benchmarks.throughput --json

A CNN and a small transformer. Solo: one lane with all threads against the eager loop with all
threads. Together: two lanes that share the threads against one eager loop after another with all
threads. Ratios of time; above 1 means faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.common import arguments, interleaved, median_ratio, show

STEPS = 40


def cnn_job(name: str = "cnn") -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batch = (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))
    return job(name, model, optimizer, batch)


def transformer_job(name: str = "transformer") -> wf.Job:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(256, (16, 65))
    return job(name, model, optimizer, (text[:, :-1], text[:, 1:]))


def job(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]
) -> wf.Job:
    def loss(m: nn.Module, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = m(b[0])
        return F.cross_entropy(logits.flatten(0, -2), b[1].flatten())

    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=[batch] * STEPS, seed=0)


def engine_seconds(jobs: list[wf.Job], lanes: int) -> float:
    report = wf.run(jobs, memory="1GiB", lanes=lanes)
    assert report.ok, [entry.error for entry in report]
    return report.seconds


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    measures = {
        "eager_cnn": lambda: wf.run_eager(cnn_job()).wall_seconds,
        "eager_transformer": lambda: wf.run_eager(transformer_job()).wall_seconds,
        "solo_cnn": lambda: engine_seconds([cnn_job()], 1),
        "solo_transformer": lambda: engine_seconds([transformer_job()], 1),
        "together": lambda: engine_seconds([cnn_job(), transformer_job()], 2),
        "two_cnns": lambda: engine_seconds([cnn_job("a"), cnn_job("b")], 2),
    }
    interleaved(measures, 1)
    found = interleaved(measures, options.repeats)
    both = [a + b for a, b in zip(found["eager_cnn"], found["eager_transformer"], strict=True)]
    result: dict[str, object] = {
        "cnn_solo_vs_eager": median_ratio(found["eager_cnn"], found["solo_cnn"]),
        "transformer_solo_vs_eager": median_ratio(
            found["eager_transformer"], found["solo_transformer"]
        ),
        "together_vs_one_after_another": median_ratio(both, found["together"]),
        "two_cnns_vs_one_after_another": median_ratio(
            [2 * seconds for seconds in found["eager_cnn"]], found["two_cnns"]
        ),
    }
    show(result, options.json)


if __name__ == "__main__":
    main()
