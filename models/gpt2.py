"""GPT-2 (Radford et al., Language models are unsupervised multitask learners, 2019).

A transformer decoder with the norms before the layers, a last norm, and a head that is the
embedding. A batch is token ids and the ids that follow them, both (N, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.text import next_token_task


@dataclass(frozen=True, kw_only=True)
class Gpt2Config:
    """The sizes of a GPT-2; the defaults are GPT-2 small."""

    vocabulary: int = 50_257
    width: int = 768
    layers: int = 12
    heads: int = 12
    positions: int = 1_024
    dropout: float = 0.1
    epsilon: float = 1e-5


class Attention(nn.Module):
    """Self-attention of each token over itself and those before it."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.chance = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, T, width) to the same."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        chance = self.chance if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=chance, is_causal=True)
        mixed: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.attention = Attention(config)
        self.inner_norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, T, width) to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        inner = F.gelu(self.expand(self.inner_norm(x)), approximate="tanh")
        result: torch.Tensor = x + self.dropout(self.contract(inner))
        return result


class Gpt2(nn.Module):
    """GPT-2 as a language model: token ids (N, T) to logits (N, T, vocabulary)."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.apply(_initialise)
        self._shrink_residuals()

    def _shrink_residuals(self) -> None:
        """Keeps the sum of 2 * layers shortcuts as large as one (Radford et al., section 2.3)."""
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.attention.out, block.contract):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows each token.

        Raises:
            ValueError: the sequences are longer than the model has positions.
        """
        length = ids.shape[1]
        if length > self.config.positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {self.config.positions} "
                "positions of this model: cut it, or make the model with more positions"
            )
        places = torch.arange(length, device=ids.device)
        x = self.dropout(self.words(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def gpt2() -> Gpt2:
    """GPT-2 small: 124,439,808 parameters, the tied head counted once."""
    return Gpt2(Gpt2Config())


def gpt2_tiny() -> Gpt2:
    """Two layers of width 32, for tests."""
    return Gpt2(Gpt2Config(vocabulary=128, width=32, layers=2, heads=2, positions=32))


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with the rate and decay of the first GPT; Radford et al. give none."""
    return torch.optim.AdamW(parameters, lr=2.5e-4, weight_decay=0.01)


#: The model named GPT-2 small; "_small" is the variant for tests, as everywhere in the zoo.
GPT2 = next_token_task("gpt2", 124_439_808, gpt2, _adamw, length=1_024, vocabulary=50_257)
GPT2_SMALL = next_token_task("gpt2_small", 30_592, gpt2_tiny, _adamw, length=16, vocabulary=128)
