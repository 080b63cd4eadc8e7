"""Trainers of Hugging Face Transformers with tiny models, and what their own training comes to."""

import this
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

TEXT = Path(this.__file__).read_bytes()
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
ENCODER = {**SMALL, "vocab_size": 64, "intermediate_size": 24, "max_position_embeddings": 32}
SEED = 42


def sentences(labels, rows=20, length=12):
    """Rows of bytes of a text; labelled with themselves, or with a class."""
    found = []
    for row in range(rows):
        ids = torch.tensor([1 + byte % 60 for byte in TEXT[row * length : (row + 1) * length]])
        found.append({"input_ids": ids, "labels": ids if labels == "text" else row % 3})
    return found


def pictures(rows=20):
    pixels = torch.rand(rows, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    return [{"pixel_values": pixels[row], "labels": row % 3} for row in range(rows)]


def encoder(name, **options):
    config = getattr(transformers, f"{name}Config")(**{**ENCODER, **options}, num_labels=3)
    return getattr(transformers, f"{name}ForSequenceClassification")(config), sentences("class")


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), sentences("text")


def llama():
    config = transformers.LlamaConfig(**ENCODER, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config), sentences("text")


def opt():
    config = transformers.OPTConfig(**SMALL, vocab_size=64, ffn_dim=24, word_embed_proj_dim=16)
    return transformers.OPTForCausalLM(config), sentences("text")


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), sentences("text")


def vit():
    config = transformers.ViTConfig(
        **SMALL, intermediate_size=24, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config), pictures()


def padded(make):
    """The same with masks, of which some batches' are of ones alone."""

    def made():
        model, data = make()
        for row, example in enumerate(data):
            mask = torch.ones(12, dtype=torch.long)
            mask[12 - row // 5 :] = 0
            example["attention_mask"] = mask
        return model, data

    return made


MODELS = {
    "bert": lambda: encoder("Bert"),
    "roberta": lambda: encoder("Roberta"),
    "distilbert": lambda: encoder("DistilBert", dim=16, n_layers=1, n_heads=2, hidden_dim=24),
    "albert": lambda: encoder("Albert", embedding_size=8),
    "electra": lambda: encoder("Electra", embedding_size=8),
    "gpt2": gpt2,
    "llama": llama,
    "opt": opt,
    "t5": t5,
    "vit": vit,
    "padded bert": padded(lambda: encoder("Bert")),
    "padded llama": padded(llama),
}


def trainer(make, tmp_path, kind=transformers.Trainer, keywords=(), **options):
    torch.manual_seed(1)
    model, data = make()
    arguments = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 0,
        "seed": SEED,
        **options,
    }
    args = transformers.TrainingArguments(output_dir=str(tmp_path), **arguments)
    return kind(model=model, args=args, train_dataset=data, **dict(keywords))


def trained_by_host(host):
    """The losses of a Trainer's own training, each as it was differentiated."""
    losses = []
    step = host.training_step

    def training_step(*arguments):
        loss = step(*arguments)
        losses.append(float(loss))
        return loss

    host.training_step = training_step
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.set_seed(SEED)
    host.train()
    torch.set_num_threads(before)
    return losses


def same_weights(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def masked_at_random(features):
    """A collator that draws: the batches after it see other random numbers."""
    batch = transformers.default_data_collator(features)
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 3)
    return batch
