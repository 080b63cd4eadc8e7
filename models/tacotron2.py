"""Tacotron 2 (Shen et al., ICASSP 2018): characters to mel spectrograms, with teacher forcing.

The decoder is unrolled frame by frame by Python, so a step is tens of thousands of small kernels.
Where Shen et al. leave a choice this is the form that is mostly used: the attention sees the last
alignment beside the sum of all, and the decoder's cells have dropout in the place of zoneout.

A batch is characters (N, 100), mels (N, 80, frames) and gates (N, frames), 1.0 at the last frame.
All sequences of a batch are equally long: there is no padding, and no mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: Characters of a sequence: a sentence of LJ Speech has about as many.
CHARACTERS = 100
#: A training step captured on the host then has 82,100 nodes: 202 per frame and 1,300 besides.
FRAMES = 400


@dataclass(frozen=True, kw_only=True)
class TacotronConfig:
    """The sizes of a Tacotron 2; the defaults are those of Shen et al., for 148 symbols of English.

    Attributes:
        symbols: number of characters.
        channels: number of mel channels.
        width: channels of the encoder; each direction of its LSTM has half of them.
        kernel: of the encoder's and the postnet's convolutions.
        encoder_layers: number of the encoder's convolutions.
        prenet: width of the two layers before the decoder.
        cells: width of the decoder's two LSTM cells.
        attention: width in which query, keys and places are compared.
        filters: number of filters over the alignments.
        filter_kernel: their length.
        postnet: channels of the convolutions after the decoder.
        postnet_layers: number of these.
        dropout: of prenet and convolutions.
        cell_dropout: of the cells' outputs.
    """

    symbols: int = 148
    channels: int = 80
    width: int = 512
    kernel: int = 5
    encoder_layers: int = 3
    prenet: int = 256
    cells: int = 1_024
    attention: int = 128
    filters: int = 32
    filter_kernel: int = 31
    postnet: int = 512
    postnet_layers: int = 5
    dropout: float = 0.5
    cell_dropout: float = 0.1


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """A convolution that keeps the length, and its norm."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, padding=padding), nn.BatchNorm1d(outputs)
    )


class Encoder(nn.Module):
    """Embedded characters through convolutions and an LSTM in both directions."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(config.symbols, width)
        self.convolutions = nn.ModuleList(
            _convolution(width, width, config.kernel) for _ in range(config.encoder_layers)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Maps (N, characters) to (N, characters, width)."""
        x = self.embedding(characters).transpose(1, 2)
        for convolution in self.convolutions:
            x = self.dropout(F.relu(convolution(x)))
        encoded: torch.Tensor = self.lstm(x.transpose(1, 2))[0]
        return encoded


class Attention(nn.Module):
    """Location-sensitive attention (Chorowski et al., 2015): where to look next among the keys."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.cells, config.attention, bias=False)
        self.key = nn.Linear(config.width, config.attention, bias=False)
        self.filters = nn.Conv1d(
            2, config.filters, config.filter_kernel, padding=config.filter_kernel // 2, bias=False
        )
        self.place = nn.Linear(config.filters, config.attention, bias=False)
        self.score = nn.Linear(config.attention, 1, bias=False)

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, last: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """The next alignment, (N, characters), which sums to one.

        Args:
            query: output of the first cell, (N, cells).
            keys: what `key` made of the encoded characters, (N, characters, attention).
            last: the last alignment, (N, characters).
            total: the sum of all alignments so far, (N, characters).
        """
        places = self.filters(torch.stack([last, total], dim=1)).transpose(1, 2)
        compared = torch.tanh(self.query(query).unsqueeze(1) + keys + self.place(places))
        return torch.softmax(self.score(compared).squeeze(2), dim=1)


class State(NamedTuple):
    """What the decoder hands from frame to frame; each tensor begins with N."""

    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor]
    context: torch.Tensor
    alignment: torch.Tensor
    total: torch.Tensor


class Prenet(nn.Module):
    """Two small layers whose dropout never ends: the decoder must not lean on the last frame."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.channels, config.prenet, bias=False)
        self.second = nn.Linear(config.prenet, config.prenet, bias=False)
        self.chance = config.dropout

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Maps (N, frames, channels) to (N, frames, prenet)."""
        for layer in (self.first, self.second):
            frames = F.dropout(F.relu(layer(frames)), self.chance, training=True)
        return frames


class Decoder(nn.Module):
    """Two cells with the attention between them, a frame at a time."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        self.prenet = Prenet(config)
        self.attention = Attention(config)
        self.first = nn.LSTMCell(config.prenet + config.width, config.cells)
        self.second = nn.LSTMCell(config.cells + config.width, config.cells)
        self.dropout = nn.Dropout(config.cell_dropout)
        self.frame = nn.Linear(config.cells + config.width, config.channels)
        self.gate = nn.Linear(config.cells + config.width, 1)

    def forward(
        self, encoded: torch.Tensor, mels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predicts each frame from the true ones before it.

        Args:
            encoded: (N, characters, width).
            mels: the true frames, (N, channels, frames).

        Returns:
            the frames, (N, channels, frames), the gates' logits, (N, frames), and the alignments,
            (N, frames, characters).
        """
        before = F.pad(mels, (1, -1)).transpose(1, 2)  # a frame of zeros starts the sequence
        keys = self.attention.key(encoded)
        state = self._start(encoded)
        outputs, alignments = [], []
        for frame in self.prenet(before).unbind(1):
            state = self._step(frame, encoded, keys, state)
            outputs.append(torch.cat([state.second[0], state.context], dim=1))
            alignments.append(state.alignment)
        output = torch.stack(outputs, dim=1)
        frames = self.frame(output).transpose(1, 2).contiguous()  # as the mels it is held against
        return frames, self.gate(output).squeeze(2), torch.stack(alignments, dim=1)

    def _start(self, encoded: torch.Tensor) -> State:
        sequences, characters, width = encoded.shape
        cell = encoded.new_zeros(sequences, self.first.hidden_size)
        places = encoded.new_zeros(sequences, characters)
        context = encoded.new_zeros(sequences, width)
        return State((cell, cell), (cell, cell), context, places, places)

    def _step(
        self, frame: torch.Tensor, encoded: torch.Tensor, keys: torch.Tensor, state: State
    ) -> State:
        hidden, memory = self.first(torch.cat([frame, state.context], dim=1), state.first)
        first = self.dropout(hidden), memory
        alignment = self.attention(first[0], keys, state.alignment, state.total)
        context = torch.bmm(alignment.unsqueeze(1), encoded).squeeze(1)
        hidden, memory = self.second(torch.cat([first[0], context], dim=1), state.second)
        second = self.dropout(hidden), memory
        return State(first, second, context, alignment, state.total + alignment)


class Postnet(nn.Module):
    """Convolutions that see frames on both sides and predict what the decoder missed."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        widths = [config.channels, *[config.postnet] * (config.postnet_layers - 1), config.channels]
        self.convolutions = nn.ModuleList(
            _convolution(inputs, outputs, config.kernel) for inputs, outputs in pairwise(widths)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, frames) to the same."""
        *inner, last = self.convolutions
        for convolution in inner:
            frames = self.dropout(torch.tanh(convolution(frames)))
        residual: torch.Tensor = self.dropout(last(frames))
        return residual


class Spectrogram(NamedTuple):
    """What the model predicts.

    Attributes:
        before: mels before the postnet, (N, channels, frames).
        after: mels after it, of the same shape.
        gates: logits that a frame is the last, (N, frames).
        alignments: where each frame looked, (N, frames, characters).
    """

    before: torch.Tensor
    after: torch.Tensor
    gates: torch.Tensor
    alignments: torch.Tensor


class Tacotron2(nn.Module):
    """Characters (N, characters) and the true mels (N, channels, frames) to predicted mels."""

    def __init__(self, config: TacotronConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.postnet = Postnet(config)

    def forward(self, characters: torch.Tensor, mels: torch.Tensor) -> Spectrogram:
        """Predicts every frame from the characters and the true frames before it."""
        before, gates, alignments = self.decoder(self.encoder(characters), mels)
        return Spectrogram(before, before + self.postnet(before), gates, alignments)


def spectrogram_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Squared error before and after the postnet, and binary cross entropy of the gates."""
    characters, mels, gates = batch
    found: Spectrogram = model(characters, mels)
    error = F.mse_loss(found.before, mels) + F.mse_loss(found.after, mels)
    return error + F.binary_cross_entropy_with_logits(found.gates, gates)


def _speech(sequences: int, characters: int, frames: int, config: TacotronConfig) -> Batch:
    gates = torch.zeros(sequences, frames)
    gates[:, -1] = 1
    ids = torch.randint(config.symbols, (sequences, characters))
    return ids, torch.randn(sequences, config.channels, frames), gates


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-6)


def _task(name: str, parameters: int, config: TacotronConfig, characters: int, frames: int) -> Task:
    return Task(
        name=name,
        unit="sequences",
        parameters=parameters,
        model=lambda: Tacotron2(config),
        loss=spectrogram_loss,
        batch=lambda sequences: _speech(sequences, characters, frames, config),
        optimizer=_adam,
    )


def tacotron2_task(frames: int = FRAMES) -> Task:
    """Training on sequences of that many frames, of which 80 are a second in Shen et al.

    Raises:
        ValueError: `frames` is below 1.
    """
    if frames < 1:
        raise ValueError(f"frames must be a whole number of 1 or more, got {frames}")
    return _task("tacotron2", 28_193_153, TacotronConfig(), CHARACTERS, frames)


#: Sizes for tests.
TINY = TacotronConfig(
    symbols=20,
    channels=8,
    width=16,
    encoder_layers=1,
    prenet=8,
    cells=16,
    attention=8,
    filters=4,
    filter_kernel=5,
    postnet=16,
    postnet_layers=2,
)
TACOTRON2 = tacotron2_task()
TACOTRON2_SMALL = _task("tacotron2_small", 11_313, TINY, characters=7, frames=3)
