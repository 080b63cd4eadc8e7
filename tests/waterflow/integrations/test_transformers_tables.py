"""Each argument and method of a Trainer is taken over, refused by name, or changes no number: one
that a newer Transformers brings fails here, and is looked at."""

import dataclasses

import numpy as np
import pytest
import torch

import waterflow as wf
from tests.support.tables import soaked
from tests.support.trainers import MODELS, SEED, same_weights, sentences, trained_by_host, trainer
from waterflow.integrations.transformers import (
    CALLED,
    OWN_OR_UNCALLED,
    TAKEN_OVER,
    WITHOUT_NUMBERS,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.cpu

#: A value that is refused of each argument that is; None: only other machines take one.
REFUSED_ARGUMENTS = {
    "fp16": True,
    "tf32": None,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "torch_compile_backend": "aot_eager",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "full_determinism": None,  # it changes the process
    "parallelism_config": None,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "fsdp": None,
    "fsdp_config": None,
    "deepspeed": None,
    "debug": "underflow_overflow",
    "resume_from_checkpoint": "somewhere",
}

#: What a loop of the Trainer's own does, of which the job makes none.
REFUSED_METHODS = frozenset(
    {
        *("train", "training_step", "_inner_training_loop", "_run_epoch", "_evaluate"),
        *("_maybe_log_save_evaluate", "_finalize_training", "_init_training_state"),
        *("_prepare_for_training", "_wrap_model", "_clip_grad_norm", "_get_grad_norm"),
        *("_mixed_mesh_grad_norm", "_has_mixed_mesh_grads", "_get_num_items_in_batch"),
        *("get_batch_samples", "_prepare_input", "_prepare_inputs", "set_initial_training_values"),
        *("_prepare_context_parallel_inputs", "compute_loss_context_manager"),
        *("autocast_smart_context_manager", "_get_dataloader", "_remove_unused_columns"),
        *("_set_signature_columns_if_needed", "_get_collator_with_removed_columns"),
        *("_build_accelerator_args", "create_accelerator_and_postprocess", "_validate_args"),
        *("_move_model_to_device", "call_model_init", "_update_auto_batch_size"),
        *("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters"),
        *("add_callback", "pop_callback", "remove_callback", "log", "log_metrics", "end"),
        *("metrics_format", "save_metrics", "save_state", "store_flos", "floating_point_ops"),
        *("_track_num_input_tokens", "_determine_best_metric", "_get_output_dir"),
        *("_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"),
        *("_load_best_model", "_load_callback_state", "_load_from_checkpoint"),
        *("_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler"),
        *("_issue_warnings_after_load", "_push_from_checkpoint", "_finish_current_push"),
        *("_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint"),
        *("get_learning_rates", "_get_learning_rate", "get_num_trainable_parameters"),
        *("get_optimizer_group", "get_cp_size", "get_sp_size", "get_tp_size"),
        *("is_local_process_zero", "is_world_process_zero"),
    }
)


def test_every_argument_is_in_a_table():
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert TAKEN_OVER | WITHOUT_NUMBERS | set(REFUSED_ARGUMENTS) == known
    assert len(TAKEN_OVER) + len(WITHOUT_NUMBERS) + len(REFUSED_ARGUMENTS) == len(known)


def test_every_method_is_in_a_table():
    known = {
        name
        for name, value in vars(transformers.Trainer).items()
        if not name.startswith("__")
        and (callable(value) or isinstance(value, (property, staticmethod, classmethod)))
    }
    assert known == CALLED | OWN_OR_UNCALLED | REFUSED_METHODS
    assert len(CALLED) + len(OWN_OR_UNCALLED) + len(REFUSED_METHODS) == len(known)


@pytest.mark.parametrize(
    "argument", [name for name, value in REFUSED_ARGUMENTS.items() if value is not None]
)
def test_an_argument_that_is_not_taken_over_is_refused_by_name(argument, tmp_path):
    given = trainer(MODELS["bert"], tmp_path)
    setattr(given.args, argument, REFUSED_ARGUMENTS[argument])
    with pytest.raises(wf.JobError, match=f"'mine': from_trainer cannot take over {argument}="):
        wf.from_trainer(given, "mine")


@pytest.mark.parametrize("method", sorted(REFUSED_METHODS))
def test_a_method_of_ones_own_that_nobody_would_call_is_refused_by_name(method, tmp_path):
    inherited = vars(transformers.Trainer)[method]
    own = {method: inherited} if isinstance(inherited, (property, staticmethod)) else {}
    given = trainer(MODELS["bert"], tmp_path)
    base = type(given)
    own[method] = lambda self, *arguments, **options: getattr(base, method)(
        self, *arguments, **options
    )
    given.__class__ = type("Mine", (base,), own)
    with pytest.raises(wf.JobError, match=rf"from_trainer cannot take over Mine\.{method}:"):
        wf.from_trainer(given, "mine")


@pytest.mark.parametrize(
    "options",
    [
        {"auto_find_batch_size": True},
        {"logging_nan_inf_filter": False, "logging_steps": 1, "logging_first_step": True},
        soaked({"include_num_input_tokens_seen": "all", "logging_steps": 2}),
        soaked({"torch_empty_cache_steps": 1, "skip_memory_metrics": False}),
        {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        soaked({"ignore_data_skip": True, "log_level": "error", "run_name": "named"}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_said_to_change_no_number_changes_none(options, tmp_path):
    host, guest = (trainer(MODELS["bert"], tmp_path / one, **options) for one in ("host", "guest"))
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    losses = trained_by_host(host)
    assert report["guest"].losses == losses
    assert len(losses) == 6
    same_weights(host.model, guest.model)


def class_of(logits, labels):
    return logits.argmax(-1)


def accuracy(prediction):
    assert prediction.predictions.ndim == 1
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def test_logits_are_preprocessed_for_metrics_as_in_the_host(tmp_path):
    keywords = {
        "eval_dataset": sentences("class", rows=9),
        "compute_metrics": accuracy,
        "preprocess_logits_for_metrics": class_of,
    }
    options = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    host, guest = (
        trainer(MODELS["bert"], tmp_path, keywords=keywords, **options) for _ in range(2)
    )
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    torch.manual_seed(SEED)
    assert report["guest"].losses == trained_by_host(host)
    told = [entry["eval_accuracy"] for entry in host.state.log_history if "eval_loss" in entry]
    assert [found.values["eval_accuracy"] for found in report["guest"].evaluations] == told
    assert len(told) == 2
    same_weights(host.model, guest.model)
