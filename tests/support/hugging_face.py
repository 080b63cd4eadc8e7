# ruff: noqa: C408  (a table of keyword arguments reads best as calls)
"""Hugging Face models with tiny random weights: nothing is downloaded."""

from __future__ import annotations

from functools import partial

import torch

from tests.support.data import hf_loss
from tests.support.jobs import adamw, sgd, table

transformers_options = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def bert(attention="sdpa"):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        attn_implementation=attention,
        **transformers_options,
    )
    return BertForSequenceClassification(config).train()


def gpt2(attention="sdpa"):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_implementation=attention
    )
    return GPT2LMHeadModel(config).train()


def encodings(mask=None, padding=0, side="right", causal=False, count=2):
    """Tokenized batches: `mask` None leaves the mask out; `padding` tokens are masked."""
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(count):
        ids = torch.randint(1, 40, (3, 7), generator=generator)
        parts = {"input_ids": ids}
        if mask is not None:
            ones = torch.ones_like(ids)
            for row in range(padding):
                amount = row + 1 + number
                columns = slice(-amount, None) if side == "right" else slice(None, amount)
                ones[row, columns] = 0
            parts["attention_mask"] = ones
        labels = ids.clone() if causal else torch.randint(0, 3, (3,), generator=generator)
        if causal and mask is not None:
            labels[parts["attention_mask"] == 0] = -100
        batches.append(BatchEncoding({**parts, "labels": labels}))
    return batches


def entries(name, model, causal):
    forms = {
        "plain": {},
        "ones": {"mask": True},
        "padded": {"mask": True, "padding": 2},
        "left": {"mask": True, "padding": 2, "side": "left"},
    }
    optimizers = [adamw, sgd]
    return {
        f"{name}_{form}": dict(
            model=model,
            data=partial(encodings, causal=causal, **options),
            loss=hf_loss,
            optimizer=optimizers[number % 2],
        )
        for number, (form, options) in enumerate(forms.items())
    }


HUGGING_FACE = table(
    **entries("bert", bert, False),
    **entries("gpt2", gpt2, True),
    bert_eager_attention=dict(
        model=partial(bert, "eager"), data=partial(encodings, True, 1), loss=hf_loss
    ),
    gpt2_eager_attention=dict(
        model=partial(gpt2, "eager"), data=partial(encodings, True, 1, causal=True), loss=hf_loss
    ),
)
