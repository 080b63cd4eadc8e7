"""Five folds of a CNN on digits side by side, each validated after every epoch."""

import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import waterflow as wf

loaded = load_digits()
IMAGES, LABELS = torch.tensor(loaded.images[:, None] / 16).float(), torch.tensor(loaded.target)


def fold(number: int, train: list[int], held: list[int], epochs: int) -> wf.Job:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)]
    model = nn.Sequential(*layers)
    return wf.Job(
        f"fold-{number}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        data=DataLoader(Subset(TensorDataset(IMAGES, LABELS), train), 64, shuffle=True),
        epochs=epochs,
        seed=number,
        evaluate=lambda m: (m(IMAGES[held]).argmax(1) == LABELS[held]).float().mean().item(),
    )


if __name__ == "__main__":
    splits = StratifiedKFold(5, shuffle=True, random_state=0).split(IMAGES, LABELS)
    jobs = [fold(n, train.tolist(), held.tolist(), 10) for n, (train, held) in enumerate(splits)]
    accuracies = [job.evaluations[-1].values["value"] for job in wf.run(jobs, memory="64MiB")]
    print(f"{statistics.mean(accuracies):.1%}, deviation {statistics.stdev(accuracies):.1%}")
