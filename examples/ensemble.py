"""An ensemble: the same network from five seeds, on batches that are made once for all of them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, softmax
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

loaded = load_digits()
IMAGES, LABELS = torch.tensor(loaded.data / 16).float(), torch.tensor(loaded.target)
TRAIN = TensorDataset(IMAGES[:1200], LABELS[:1200])


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def member(seed: int, data: object, epochs: int) -> wf.Job:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"optimizer": optimizer, "loss": loss, "epochs": epochs, "seed": seed}
    return wf.Job(f"seed-{seed}", model=model, data=data, **options)


if __name__ == "__main__":
    batches = wf.shared(DataLoader(TRAIN, 32, shuffle=True), seed=0)
    jobs = [member(seed, batches, 10) for seed in range(5)]
    wf.run(jobs, memory="32MiB").raise_errors()
    with torch.no_grad():
        votes = torch.stack([softmax(job.model.eval()(IMAGES[1200:]), 1) for job in jobs])
    alone = (votes.argmax(2) == LABELS[1200:]).float().mean(1)
    together = (votes.mean(0).argmax(1) == LABELS[1200:]).float().mean()
    print(f"alone {alone.min():.1%} to {alone.max():.1%}, together {together:.1%}")
