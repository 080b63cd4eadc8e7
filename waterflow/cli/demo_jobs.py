"""The demo's jobs: a search over learning rates and three architectures on real digits.

Plain torch. Nothing here is downloaded: the digits come with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from waterflow.job.job import Job

_TEST_DIGITS = 389  # of 1,797, so that 1,408 = 22 x 64 are left to train on
_SIDE, _CLASSES = 8, 10


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the demo is; the tests take a smaller one."""

    rates: tuple[float, ...] = (1e-2, 3e-3, 1e-3, 3e-4)
    batch: int = 64
    epochs: int = 15
    width: int = 64


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, and how good its trained model is on data that it has not seen: from 0 to 1."""

    job: Job
    accuracy: Callable[[], float]


def make_tasks(size: Size) -> list[Task]:
    """Return fresh jobs, the same ones in the same initial state at every call.

    Raises ModuleNotFoundError without scikit-learn.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    train = TensorDataset(images[_TEST_DIGITS:], labels[_TEST_DIGITS:])
    test = images[:_TEST_DIGITS], labels[:_TEST_DIGITS]
    return [
        _task(name, architecture, rate, size, train, test)
        for name, architecture in ARCHITECTURES.items()
        for rate in size.rates
    ]


def _task(
    name: str,
    architecture: Callable[[int], nn.Module],
    rate: float,
    size: Size,
    train: TensorDataset,
    test: tuple[torch.Tensor, torch.Tensor],
) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture(size.width)
    job = Job(
        f"{name} lr={rate:g}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate),
        loss=_loss,
        data=DataLoader(train, size.batch, shuffle=True, drop_last=True),
        epochs=size.epochs,
        seed=0,
    )
    return Task(job=job, accuracy=lambda: _accuracy(model, *test))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


class _Residual(nn.Module):
    """x + W tanh(V x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def _mlp(width: int) -> nn.Module:
    blocks = (_Residual(width) for _ in range(4))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_SIDE**2, width), *blocks, nn.Linear(width, _CLASSES)
    )


def _cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, _SIDE)),
        nn.Conv2d(1, width // 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width // 8, width // 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width // 4 * (_SIDE // 2) ** 2, _CLASSES),
    )


class _RowReader(nn.Module):
    """A GRU that reads an image row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(_SIDE + width, 2 * width)
        self.candidate = nn.Linear(_SIDE + width, width)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        state = images.new_zeros(len(images), self.width)
        for row in images.unbind(1):
            reset, update = torch.sigmoid(self.gates(torch.cat((row, state), 1))).chunk(2, 1)
            candidate = torch.tanh(self.candidate(torch.cat((row, reset * state), 1)))
            state = state + update * (candidate - state)
        return self.head(state)


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "gru": _RowReader,
}


def _accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(-1) == labels
    model.train(was_training)
    return float(right.float().mean())
