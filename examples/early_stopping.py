"""Successive halving: of twelve trials on the handwritten digits, few are trained to the end.

    python examples/early_stopping.py

All trials are submitted at once. As many run as fit in the budget; when one is given up, its memory
goes to the next in the queue. At a rung, a trial goes on only if its loss is in the better half of
all that have come so far (the asynchronous form of successive halving, which never waits).
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

MEMORY = "3MiB"
TRIALS = 12
BATCH = 128
RUNGS = (11, 22, 44)  # one epoch has 11 steps
STEPS = 110


class Halving:
    """The rule, as an `on_step` callback that all trials share."""

    def __init__(self) -> None:
        self.losses: dict[int, list[float]] = {rung: [] for rung in RUNGS}

    def __call__(self, step: wf.StepResult) -> object:
        """Return wf.STOP for a trial to give up."""
        if step.step not in RUNGS:
            return None
        seen = self.losses[step.step]
        seen.append(step.loss)
        better = sum(loss < step.loss for loss in seen)
        return None if better < (len(seen) + 1) // 2 else wf.STOP


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 digits of 8 x 8 pixels, shuffled once, as a training and a test set."""
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(loaded.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(loaded.target)[order]
    return TensorDataset(images[389:], labels[389:]), TensorDataset(images[:389], labels[:389])


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def trial(index: int, train: TensorDataset, rule: Halving) -> wf.Job:
    """A trial with a learning rate and a width drawn at random."""
    draw = torch.rand(2, generator=torch.Generator().manual_seed(index)).tolist()
    rate, width = 10 ** (-4 + 3 * draw[0]), 32 * round(8 * draw[1] + 1)
    torch.manual_seed(index)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    return wf.Job(
        f"trial {index}, lr {rate:.0e}, width {width}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate),
        loss=loss,
        data=DataLoader(train, BATCH, shuffle=True),
        steps=STEPS,
        seed=index,
        on_step=rule,
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of the test digits that the model reads correctly."""
    images, labels = test.tensors
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> dict[str, float]:
    """Run the trials; return the accuracy of each that came to the end, best first."""
    train, test = digits()
    rule = Halving()
    trials = [trial(index, train, rule) for index in range(TRIALS)]
    with wf.Engine(memory=MEMORY) as engine:
        handles = [engine.submit(job) for job in trials]
        for handle in handles:
            result = handle.result()
            note = f": {result.error}" if result.error else ""
            print(f"{result.name}: {result.state} after {result.steps} steps{note}")
        report = engine.report()
    finished = [job for job in trials if report[job.name].state == "finished"]
    accuracies = {job.name: accuracy(job.model, test) for job in finished}
    ranking = dict(sorted(accuracies.items(), key=lambda item: -item[1]))
    print()
    for name, value in ranking.items():
        print(f"{name}: test accuracy {value:.1%}")
    done = sum(job.steps for job in report)
    peak = report.peak_bytes / 2**20
    print(f"{done} steps instead of {TRIALS * STEPS}, at most {peak:.1f} MiB of {MEMORY}")
    return ranking


if __name__ == "__main__":
    main()
