"""Jobs as people make them of large packages: small ones of transformers' own models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import waterflow as wf

WORDS = 40


def _batches() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "ids": torch.randint(0, WORDS, (4, 8), generator=draw),
            "labels": torch.randint(0, 2, (4,), generator=draw),
        }
        for _ in range(6)
    ]


BATCHES = _batches()


def samples() -> list[dict[str, torch.Tensor]]:
    """What a Trainer makes batches of."""
    pairs = [pair for batch in BATCHES for pair in zip(batch["ids"], batch["labels"], strict=True)]
    return [{"input_ids": ids, "labels": label} for ids, label in pairs]


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )


def bert(config: Any = None) -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(config or bert_config())


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=batch["ids"], labels=batch["labels"]).loss
    return found


class CountingLoss:
    """Weighs each step by how many there were, as a warm-up of the loss does."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        return classified(model, batch) * min(1.0, self.steps / 10)


class Measured(nn.Module):
    """A model that keeps the mean of what it finds."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.bert, self.metric = bert(), metric

    def forward(self, **given: Any) -> Any:
        found = self.bert(**given)
        self.metric(found.logits.detach().mean())
        return found


def bert_job(name: str = "bert", seed: int = 0, **given: Any) -> wf.Job:
    torch.manual_seed(seed)
    model = given.pop("model", None) or bert()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    given = {"loss": classified, "data": BATCHES, "steps": 6, **given}
    return wf.Job(name, model=model, optimizer=optimizer, seed=seed, **given)


def mean_metric() -> Any:
    from torchmetrics import MeanMetric

    return MeanMetric()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"word{n}": n for n in range(2, WORDS)}
    found = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="[PAD]", unk_token="[UNK]")


def collator(called: str) -> Any:
    """What makes batches of samples: with a "tokenizer", by "padding", by "masking"."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    known = tokenizer()
    if called == "tokenizer":
        return lambda samples: known([str(len(sample)) for sample in samples], truncation=True)
    if called == "padding":
        return DataCollatorWithPadding(known)
    known.mask_token = "[UNK]"
    return DataCollatorForLanguageModeling(known, seed=0)
