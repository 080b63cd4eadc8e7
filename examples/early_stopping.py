"""Successive halving: sixteen trials start, half of them are given up at each rung, few go to the end.

    python examples/early_stopping.py

All trials are submitted at once. As many run as fit in the budget; when one is given up, its memory
goes to the next in the queue. At a rung, a trial goes on only if its loss is among the better half
of all that have come so far (the asynchronous form of successive halving, which never waits).
"""

import torch
from torch import nn
from torch.nn import functional

import waterflow as wf

MEMORY = "4MiB"
RUNGS = (10, 20, 40)
STEPS = 80
TRIALS = 16
BATCH = 64


class Halving:
    """The rule, as an `on_step` callback that all trials share."""

    def __init__(self) -> None:
        self.losses: dict[int, list[float]] = {rung: [] for rung in RUNGS}

    def __call__(self, step: wf.StepResult) -> object:
        if step.step not in RUNGS:
            return None
        seen = self.losses[step.step]
        seen.append(step.loss)
        better = sum(loss < step.loss for loss in seen)
        return None if better < (len(seen) + 1) // 2 else wf.STOP


def wave(rows: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of points (x, y) with the height of a wave over them."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(rows, BATCH, 2, generator=generator) * 4 - 2
    heights = torch.sin(3 * points[..., :1]) * torch.cos(2 * points[..., 1:])
    return list(zip(points, heights, strict=True))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    points, heights = batch
    return functional.mse_loss(model(points), heights)


def trial(index: int, rule: Halving) -> wf.Job:
    """A trial with hyperparameters drawn at random: learning rate, width, weight decay."""
    generator = torch.Generator().manual_seed(index)
    draw = torch.rand(3, generator=generator).tolist()
    rate, width, decay = 10 ** (-4 + 3 * draw[0]), int(32 * 8 ** draw[1]), 10 ** (-5 + 4 * draw[2])
    torch.manual_seed(index)
    model = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    return wf.Job(
        f"{index:2}: lr={rate:.1e} width={width} decay={decay:.0e}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay),
        loss=loss,
        data=wave(20, seed=0),
        steps=STEPS,
        seed=index,
        on_step=rule,
    )


@torch.no_grad()
def error(model: nn.Module) -> float:
    """The mean squared error on points that no trial has seen."""
    test = wave(4, seed=1)
    return sum(float(loss(model, batch)) for batch in test) / len(test)


def main() -> dict[str, float]:
    """Run the trials; return the error of each that came to the end, best first."""
    rule = Halving()
    trials = [trial(index, rule) for index in range(TRIALS)]
    with wf.Engine(memory=MEMORY) as engine:
        handles = [engine.submit(job) for job in trials]
        for handle in handles:
            result = handle.result()
            note = f": {result.error}" if result.error else ""
            print(f"{result.name}: {result.state} after {result.steps} steps{note}")
        report = engine.report()
    finished = [job for job in trials if report[job.name].state == "finished"]
    errors = {job.name: error(job.model) for job in finished}
    ranking = dict(sorted(errors.items(), key=lambda item: item[1]))
    for name, value in ranking.items():
        print(f"{name}: error {value:.4f}")
    done = sum(job.steps for job in report)
    print(f"{done} steps of {TRIALS * STEPS}, at most {report.peak_bytes / 2**20:.1f} MiB of {MEMORY}")
    return ranking


if __name__ == "__main__":
    main()
