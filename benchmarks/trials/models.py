"""Trials of one architecture with different learning rates, on ready batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import waterflow as wf

CLASSES = 10
BATCHES = 30
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """x + W tanh(V x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(4)), nn.Linear(64, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )


class Unrolled(nn.Module):
    """A GRU, one row of the image after the other, as operators of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Linear(8 + width, 2 * width)
        self.new = nn.Linear(8 + width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        state = images.new_zeros(images.shape[0], self.width)
        for row in images.unflatten(1, (8, 8)).unbind(1):
            gates = torch.sigmoid(self.gates(torch.cat((row, state), 1)))
            reset, update = gates.chunk(2, 1)
            new = torch.tanh(self.new(torch.cat((row, reset * state), 1)))
            state = state + update * (new - state)
        return self.head(state)


class Attention(nn.Module):
    """A layer of a transformer, its attention written out so that vmap can take it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (part.transpose(-2, -3) for part in parts)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.join((weights @ value).transpose(-2, -3).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """Reads an image row by row."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.Sequential(*(Attention(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(images.unflatten(1, (8, 8)))).mean(1))


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(size: int, seed: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 64, generator=draw),
            torch.randint(CLASSES, (size,), generator=draw),
        )
        for _ in range(BATCHES)
    ]


def make_trial(architecture: Callable[[], nn.Module], size: int) -> Callable[[int, int], wf.Job]:
    """What makes a trial's job, on batches of that size, from its number and its steps."""

    def trial(number: int, steps: int) -> wf.Job:
        torch.manual_seed(0)
        model = architecture()
        return wf.Job(
            f"trial-{number}",
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4 * 1.05**number),
            loss=classify,
            data=batches(size, seed=0),
            steps=steps,
            seed=number,
        )

    return trial


def gan_job(number: int, steps: int) -> wf.Job:
    """Two networks against each other, in a step of their own."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    rate = 1e-4 * 1.05**number
    of_maker = torch.optim.Adam(maker.parameters(), lr=rate, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=rate, betas=(0.5, 0.999))

    def step(batch: Batch) -> Tensor:
        real = batch[0]
        made = maker(torch.randn(len(real), 16))
        of_critic.zero_grad()
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
        critic_loss.backward()
        of_critic.step()
        of_maker.zero_grad()
        loss = F.softplus(-critic(made)).mean()
        loss.backward()
        of_maker.step()
        return loss

    return wf.Job(
        f"gan-{number}",
        model=[maker, critic],
        optimizers=[of_maker, of_critic],
        step=step,
        data=batches(64, seed=0),
        steps=steps,
        seed=number,
    )
