"""Four trials of a CNN on scikit-learn's handwritten digits: other learning rates, other widths.

    waterflow run examples/hpo_digits.py
    waterflow compare examples/hpo_digits.py
    python examples/hpo_digits.py

The last one also says how many of the test digits each trained model reads correctly.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

#: Side by side the trials need 50.5 MiB, the sum of what each of them needs alone.
MEMORY = "32MiB"

TRIALS = [(0.3, 32), (0.1, 48), (0.05, 64), (0.01, 64)]
EPOCHS = 4
BATCH = 128


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The 1,797 digits of 8 x 8 pixels, shuffled once, as a training and a test set."""
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(loaded.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(loaded.target)[order]
    return TensorDataset(images[389:], labels[389:]), TensorDataset(images[:389], labels[:389])


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * width * 16, 10),
    )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def jobs() -> list[wf.Job]:
    """The trials, in the same initial state at every call."""
    train, _ = digits()
    trials = []
    for rate, width in TRIALS:
        torch.manual_seed(0)
        model = cnn(width)
        trials.append(
            wf.Job(
                f"lr={rate} width={width}",
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
                loss=loss,
                data=DataLoader(train, BATCH, shuffle=True, drop_last=True),
                epochs=EPOCHS,
                seed=0,
            )
        )
    return trials


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test digits that the model reads correctly."""
    images, labels = digits()[1].tensors
    model.eval()
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    trials = jobs()
    report = wf.run(trials, memory=MEMORY, progress=True)
    for job in trials:
        print(f"{job.name}: {report[job.name].state}, test accuracy {accuracy(job.model):.1%}")
    print(f"together at most {report.peak_bytes / 2**20:.1f} MiB of {MEMORY}")


if __name__ == "__main__":
    main()
