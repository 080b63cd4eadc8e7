"""The demo's four jobs: three trials of a CNN on real digits, one transformer on Python's source.

Plain torch. Nothing here is downloaded: the digits come with scikit-learn, and the text is the
standard library of the Python that runs the demo.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from waterflow.job.job import Job

_TEST_DIGITS = 389  # of 1,797, so that 1,408 = 11 x 128 are left to train on
_LETTERS = 128  # ASCII
_WINDOW = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the demo is; the tests take a smaller one."""

    trials: tuple[tuple[float, int], ...] = ((0.3, 32), (0.1, 48), (0.03, 64))
    digits_batch: int = 128
    digits_epochs: int = 5
    text_batch: int = 24
    text_steps: int = 80
    text_letters: int = 2_000_000
    text_width: int = 96


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, and how good its trained model is on data that it has not seen: from 0 to 1."""

    job: Job
    accuracy: Callable[[], float]


def make_tasks(size: Size) -> list[Task]:
    """Return fresh jobs, the same ones in the same initial state at every call.

    Raises ModuleNotFoundError without scikit-learn.
    """
    return [*_digits_tasks(size), _text_task(size)]


def _digits_tasks(size: Size) -> list[Task]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    train = TensorDataset(images[_TEST_DIGITS:], labels[_TEST_DIGITS:])
    test = images[:_TEST_DIGITS], labels[:_TEST_DIGITS]
    return [_digits_task(size, rate, width, train, test) for rate, width in size.trials]


def _digits_task(
    size: Size,
    rate: float,
    width: int,
    train: TensorDataset,
    test: tuple[torch.Tensor, torch.Tensor],
) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _cnn(width)
    job = Job(
        f"cnn lr={rate} width={width}",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        loss=_digits_loss,
        data=DataLoader(train, size.digits_batch, shuffle=True, drop_last=True),
        epochs=size.digits_epochs,
        seed=0,
    )
    return Task(job=job, accuracy=lambda: _accuracy(model, *test))


def _cnn(width: int) -> nn.Module:
    return nn.Sequential(
        *_convolution(1, width),
        *_convolution(width, width),
        nn.MaxPool2d(2),
        *_convolution(width, 2 * width),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * width * 16, 10),
    )


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


def _digits_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def _text_task(size: Size) -> Task:
    text = _standard_library(size.text_letters)
    windows = text.unfold(0, _WINDOW + 1, _WINDOW)
    split = len(windows) * 19 // 20
    test = windows[split:][:400]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(size.text_width)
    job = Job(
        "transformer on Python's source",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=_text_loss,
        data=DataLoader(TensorDataset(windows[:split]), size.text_batch, shuffle=True),
        steps=size.text_steps,
        clip_grad_norm=1.0,
        seed=0,
    )
    return Task(job=job, accuracy=lambda: _accuracy(model, test[:, :-1], test[:, 1:]))


def _standard_library(letters: int) -> torch.Tensor:
    """The first `letters` characters of the standard library's modules, in alphabetical order."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += bytes(letter for letter in path.read_bytes() if letter < _LETTERS)
        if len(found) >= letters:
            break
    return torch.frombuffer(found[:letters], dtype=torch.uint8).long()


def _text_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    (letters,) = batch
    scores = model(letters[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())


class Transformer(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_LETTERS, width)
        self.position = nn.Parameter(torch.zeros(_WINDOW, width))
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next character."""
        hidden = self.embedding(letters) + self.position
        return self.head(self.norm(self.blocks(hidden)))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.before_attention(hidden))
        heads = projected.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.after_attention(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed_forward(hidden)


def _accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(-1) == labels
    model.train(was_training)
    return float(right.float().mean())
