"""Every family of ``transformers`` that trains from a small configuration made by the names of its
fields: nothing is downloaded. A family's first head that the eager loop can train is the case.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

import waterflow as wf
from benchmarks.coverage.suites import Suite
from benchmarks.coverage.trial import Trial

#: Heads in the order in which they are tried, and the labels that they learn.
_HEADS = {
    "CAUSAL_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "IMAGE_CLASSIFICATION": "classes",
    "VIDEO_CLASSIFICATION": "classes",
    "AUDIO_CLASSIFICATION": "classes",
    "CTC": "tokens",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "SEQUENCE_CLASSIFICATION": "classes",
    "TOKEN_CLASSIFICATION": "tokens",
    "SEMANTIC_SEGMENTATION": "",
    "": "",
}
_BATCH, _LENGTH, _WORDS, _CLASSES, _IMAGE = 2, 10, 60, 2, 32
_LARGEST = 6_000_000  # parameters: a family whose sizes have names of their own is left out

#: Fields of configurations, by the number that they are set to.
_SMALL = {
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
    "num_encoder_layers num_decoder_layers num_key_value_heads n_kv_heads num_experts_per_tok "
    "moe_topk top_k num_experts_per_token first_k_dense_replace conv_kernel mamba_n_groups "
    "n_groups num_attention_layers n_group topk_group attn_layer_period encoder_num_hidden_layers "
    "decoder_num_hidden_layers num_block_records expert_layer_period",
    1: "attn_layer_offset expert_layer_offset n_shared_experts num_mem_blocks",
    3: "num_channels",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads num_global_experts "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_n_heads mamba_num_heads num_kv_heads linear_num_value_heads linear_num_key_heads "
    "encoder_num_attention_heads decoder_num_attention_heads head_size",
    8: "head_dim patch_size qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim kv_channels "
    "linear_key_head_dim linear_value_head_dim d_kv attention_head_dim d_head mamba_d_state "
    "state_size ssm_state_size mamba_d_head mamba_head_dim conv_kernel_size qk_head_dim "
    "index_head_dim time_step_rank global_head_dim",
    16: "q_lora_rank kv_lora_rank num_mel_bins chunk_size mamba_chunk_size sliding_window "
    "attention_window num_conv_pos_embeddings num_patches window_size vocab_size_per_layer_input "
    "hidden_size_per_layer_input",
    32: "hidden_size d_model n_embd embed_dim embedding_size dim hidden_dim emb_dim lru_width "
    "projection_dim word_embed_proj_dim encoder_hidden_size decoder_hidden_size image_size "
    "attention_hidden_size classifier_proj_size moe_intermediate_size model_dim "
    "shared_expert_intermediate_size expert_ffn_hidden_size d_embed hidden_channels",
    60: "vocab_size",
    64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner d_inner "
    "ffn_hidden_size dim_feedforward max_position_embeddings n_positions n_ctx "
    "max_source_positions max_target_positions intermediate_dim hidden_size_mlp mlp_dim "
    "max_seq_len encoder_intermediate_size decoder_intermediate_size n_ffn",
}
_VALUES = {name: value for value, names in _SMALL.items() for name in names.split()}


class Families(Suite):
    """One case per model type that has a class of its own."""

    def __init__(self) -> None:
        transformers.logging.set_verbosity_error()

    def names(self) -> Sequence[str]:
        found = {kind for head in _HEADS for kind in _classes(head) if kind in CONFIG_MAPPING}
        return sorted(found)

    def trials(self, name: str) -> Sequence[Trial]:
        reasons = []
        for head in _HEADS:
            if name not in _classes(head):
                continue
            make = functools.partial(_job, name, head)
            try:
                torch.manual_seed(0)
                job = make()
                wf.run_eager(job, threads=1)
                return [Trial(type(job.model).__name__, make)]
            except Exception as error:
                reasons.append(f"{head or 'base'}: {type(error).__name__}: {error}"[:150])
        raise ValueError("; ".join(reasons))


def _classes(head: str) -> dict[str, Any]:
    prefix = f"MODEL_FOR_{head}" if head else "MODEL"
    found: dict[str, Any] = getattr(modeling_auto, f"{prefix}_MAPPING_NAMES", {})
    return found


def _job(kind: str, head: str) -> wf.Job:
    names = _classes(head)[kind]
    make = getattr(transformers, names if isinstance(names, str) else names[0])
    config = small_config(CONFIG_MAPPING[kind])
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make(config).parameters())
    if count > _LARGEST:
        raise ValueError(f"{count} parameters: its sizes have names that are not known here")
    model = make(small_config(CONFIG_MAPPING[kind])).train()
    return wf.Job(
        kind,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=_loss,
        data=[_batch(model, config, _HEADS[head], number % 2 == 0) for number in range(4)],
        seed=0,
    )


def small_config(kind: type[PretrainedConfig], **given: Any) -> PretrainedConfig:
    """A configuration whose sizes are small; inner configurations too."""
    default = kind(**given)
    chosen = dict(given)
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            chosen[name] = small_config(type(value))
        elif name in _VALUES and type(value) is int:
            chosen[name] = min(_VALUES[name], value)
        elif name.endswith("token_id") and isinstance(value, int) and value >= _WORDS:
            chosen[name] = 1
    layers = getattr(default, "num_hidden_layers", 0)
    for name, value in vars(default).items():  # what is listed layer by layer
        if isinstance(value, list) and layers and len(value) == layers > 2:
            chosen[name] = value[:2]
    return kind(**chosen)


def _batch(
    model: Any, config: PretrainedConfig, labels: str, is_padded: bool
) -> dict[str, torch.Tensor]:
    accepted = inspect.signature(model.forward).parameters
    name = model.main_input_name
    found = {name: _INPUTS[name](config)}
    if name == "input_ids" and "attention_mask" in accepted:
        mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
        if is_padded:  # as by a tokenizer
            mask[1, -3:] = 0
        found["attention_mask"] = mask
    if labels:
        shape = (_BATCH, _LENGTH) if labels == "tokens" else (_BATCH,)
        high = _CLASSES if labels == "classes" else _WORDS
        if type(model).__name__.endswith("ForTokenClassification"):
            high = _CLASSES
        found["labels"] = torch.randint(1, high, shape)
    elif "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = _words(config)
    return found


def _words(config: PretrainedConfig) -> torch.Tensor:
    return torch.randint(3, _WORDS, (_BATCH, _LENGTH))


def _image(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", _IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    frames: int | None = getattr(config, "num_frames", None)
    shape: tuple[int, ...] = (
        _BATCH,
        *([frames] if frames else []),
        getattr(config, "num_channels", 3),
    )
    return torch.randn(*shape, height, width)


def _spectrogram(config: Any) -> torch.Tensor:
    bins: Any = getattr(config, "num_mel_bins", None) or getattr(
        config, "input_feat_per_channel", 16
    )
    length = 2 * getattr(config, "max_source_positions", 64)
    return torch.randn(_BATCH, bins, length)


_INPUTS = {
    "input_ids": _words,
    "pixel_values": _image,
    "input_values": lambda config: torch.randn(_BATCH, 2000),
    "input_features": _spectrogram,
}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result = model(**batch)
    loss: torch.Tensor | None = getattr(result, "loss", None)
    return result[0].square().mean() if loss is None else loss
