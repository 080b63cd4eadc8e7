"""BERT (Devlin et al., 2018) with its masked language model head, post-norm as published.

A batch is token ids and labels, both (N, T): a label is the token to be guessed, or `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]

#: The label of tokens that are not to be guessed.
IGNORED = -100
#: The id of [MASK] in the uncased vocabulary.
MASK = 103
#: Share of the tokens that are to be guessed (Devlin et al., section 3.1).
_MASKED = 0.15


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The sizes of a BERT; the defaults are BERT-base, uncased."""

    vocabulary: int = 30_522
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3_072
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    epsilon: float = 1e-12


class Embeddings(nn.Module):
    """Words, their places and their segments, added up."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.positions = nn.Embedding(config.positions, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """Maps token ids (N, T) to vectors (N, T, width)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        kinds = torch.zeros_like(ids) if segments is None else segments
        total = self.words(ids) + self.segments(kinds) + self.positions(places)
        embedded: torch.Tensor = self.dropout(self.norm(total))
        return embedded


class Attention(nn.Module):
    """Self-attention over all tokens, or those that a mask allows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Maps (N, T, width) to the same; `allowed` is (N, 1, 1, T), True where to look."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        chance = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, allowed, dropout_p=chance)
        mixed: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Attention and two linear layers, each with dropout, shortcut and norm after it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.expand = nn.Linear(config.width, config.inner)
        self.contract = nn.Linear(config.inner, config.width)
        self.inner_norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Maps (N, T, width) to the same."""
        x = self.attention_norm(self.dropout(self.attention(x, allowed)) + x)
        inner = self.contract(F.gelu(self.expand(x)))
        result: torch.Tensor = self.inner_norm(self.dropout(inner) + x)
        return result


class Head(nn.Module):
    """Logits over the vocabulary; its matrix is the embeddings' own."""

    def __init__(self, config: BertConfig, words: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.decoder = nn.Linear(config.width, config.vocabulary)
        self.decoder.weight = words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, T, width) to (N, T, vocabulary)."""
        logits: torch.Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return logits


class Bert(nn.Module):
    """BERT for masked language modelling: token ids (N, T) to logits (N, T, vocabulary)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config, self.embeddings.words)
        self.apply(_initialise)
        nn.init.zeros_(self.embeddings.words.weight.detach()[0])  # padding; after the tied decoder

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of every token; `mask` (N, T) is 0 where a token is padding."""
        allowed = None if mask is None else mask[:, None, None, :].bool()
        x = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, allowed)
        logits: torch.Tensor = self.head(x)
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def bert_base() -> Bert:
    """BERT-base, uncased: 109,514,298 parameters, the tied decoder counted once."""
    return Bert(BertConfig())


def bert_tiny(vocabulary: int = 128, positions: int = 64) -> Bert:
    """Two layers of width 32, for tests."""
    sizes = {"width": 32, "layers": 2, "heads": 2, "inner": 64}
    return Bert(BertConfig(vocabulary=vocabulary, positions=positions, **sizes))


def masked_language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the tokens to be guessed."""
    ids, labels = batch
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def masked_text(sequences: int, length: int, vocabulary: int) -> Batch:
    """Random ids and labels, both (sequences, length), masked as in Devlin et al., section 3.1.

    Of the tokens to be guessed eight in ten are replaced by `MASK`, one by a random token, and one
    is left. The first token is always among them: a loss over no token would be NaN.
    """
    tokens = torch.randint(1, vocabulary, (sequences, length))
    chosen = torch.rand(tokens.shape) < _MASKED
    chosen[:, 0] = True
    fate = torch.rand(tokens.shape)
    ids = tokens.masked_fill(chosen & (fate < 0.8), MASK)
    ids = torch.where(chosen & (fate > 0.9), torch.randint_like(tokens, 1, vocabulary), ids)
    return ids, tokens.masked_fill(~chosen, IGNORED)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def _task(
    name: str, parameters: int, model: Callable[[], Bert], length: int, vocabulary: int
) -> Task:
    return Task(
        name=name,
        unit="sequences",
        parameters=parameters,
        model=model,
        loss=masked_language_loss,
        batch=lambda sequences: masked_text(sequences, length, vocabulary),
        optimizer=_adam,
    )


#: Sequences of 128 tokens, as in most of the published training.
BERT_BASE = _task("bert_base", 109_514_298, bert_base, 128, 30_522)
BERT_BASE_SMALL = _task("bert_base_small", 24_608, bert_tiny, 16, 128)
