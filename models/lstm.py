"""An LSTM language model out of single operators: a step is thousands of small kernels.

`nn.LSTM` and `nn.LSTMCell` fuse the gates, and cuDNN whole sequences. This one spells every gate
out and is unrolled by Python, as recurrent cells of one's own are: what limits it is the launching.

The task is the "medium" model of Zaremba et al., "Recurrent neural network regularization" (2014),
on the Penn Treebank's 10,000 words. A batch is ids and the ids that follow them, both (N, T).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from waterflow.models.text import next_token_task


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
    """Layers of cells over embedded tokens: ids (N, T) to logits (N, T, vocabulary).

    Each call starts from zeros; `dropout` is that of all connections but the recurrent ones.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width, width) for _ in range(layers))
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows each token."""
        xs = list(self.embedding(ids).unbind(1))
        for cell in self.cells:
            hidden = memory = xs[0].new_zeros(ids.shape[0], self.width)
            for time, x in enumerate(xs):
                hidden, memory = cell(self.dropout(x), hidden, memory)
                xs[time] = hidden
        logits: torch.Tensor = self.decoder(self.dropout(torch.stack(xs, dim=1)))
        return logits


def language_model(vocabulary: int, width: int, layers: int) -> LstmModel:
    """An LSTM with dropout 0.5 and weights from -0.05 to 0.05, as Zaremba et al."""
    model = LstmModel(vocabulary, width, layers, dropout=0.5)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.05, 0.05)
    return model


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


#: Zaremba et al. clip the gradients' norm to 5, which is for the job to do, not for its optimizer.
LSTM_LM = next_token_task(
    "lstm_lm",
    19_780_400,
    lambda: language_model(10_000, 650, 2),
    _sgd,
    length=35,
    vocabulary=10_000,
)
LSTM_LM_SMALL = next_token_task(
    "lstm_lm_small", 2_002, lambda: language_model(50, 8, 2), _sgd, length=6, vocabulary=50
)
