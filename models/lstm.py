"""An LSTM language model out of single operators: a step is thousands of small kernels.

`nn.LSTM` and `nn.LSTMCell` fuse the gates, and cuDNN whole sequences. This one spells every gate
out and is unrolled by Python, as recurrent cells of one's own are: what limits it is the launching.
"""

from __future__ import annotations

import torch
from torch import nn


class Cell(nn.Module):
    """One LSTM cell (Hochreiter and Schmidhuber, 1997, with a forget gate), gate by gate."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates_of_input = nn.Linear(inputs, 4 * width)
        self.gates_of_hidden = nn.Linear(width, 4 * width)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next hidden state and memory, each (N, width)."""
        gates = self.gates_of_input(x) + self.gates_of_hidden(hidden)
        let_in, keep, candidate, let_out = gates.chunk(4, dim=1)
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(let_in) * torch.tanh(candidate)
        return torch.sigmoid(let_out) * torch.tanh(memory), memory


class LstmModel(nn.Module):
    """Layers of cells over embedded tokens: ids (N, T) to logits (N, T, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width, width) for _ in range(layers))
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows each token."""
        xs = list(self.embedding(ids).unbind(1))
        for cell in self.cells:
            hidden = memory = xs[0].new_zeros(ids.shape[0], self.width)
            for time, x in enumerate(xs):
                hidden, memory = cell(x, hidden, memory)
                xs[time] = hidden
        logits: torch.Tensor = self.decoder(torch.stack(xs, dim=1))
        return logits
