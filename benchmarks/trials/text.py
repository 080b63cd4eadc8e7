"""Jobs on text that every Python brings along, in batches of many lengths."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import waterflow as wf

LENGTH = 64
BATCH = 16
SYMBOLS = 128


@functools.cache
def text() -> Tensor:
    """Python's own help on its language, as codes below 128."""
    from pydoc_data.topics import topics

    letters = "\n".join(topics[name] for name in sorted(topics))
    codes = letters.encode("ascii", "replace")
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8).long()


class NextLetter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 64)
        self.read = nn.GRU(64, 96, batch_first=True)
        self.write = nn.Linear(96, SYMBOLS)

    def forward(self, letters: Tensor) -> Tensor:
        return self.write(self.read(self.embed(letters))[0])


def next_letter(model: nn.Module, letters: Tensor) -> Tensor:
    return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


def passages(lengths: int, seed: int) -> list[Tensor]:
    """300 batches of passages, of so many lengths in any order."""
    draw = torch.Generator().manual_seed(seed)
    shortest = LENGTH - lengths // 2
    found = []
    for index in torch.randperm(300, generator=draw).tolist():
        length = shortest + index % lengths
        starts = torch.randint(len(text()) - length, (BATCH, 1), generator=draw)
        found.append(text()[starts + torch.arange(length)])
    return found


def lengths_job(lengths: int, number: int, steps: int) -> wf.Job:
    torch.manual_seed(number)
    model = NextLetter()
    return wf.Job(
        f"reader-{number}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=next_letter,
        data=passages(lengths, seed=number),
        steps=steps,
        seed=number,
    )
