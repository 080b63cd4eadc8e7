"""A Trainer of Hugging Face Transformers as a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from waterflow.common.errors import JobError
from waterflow.integrations.transformers_data import ITEMS, Notes, Updates
from waterflow.integrations.transformers_evaluation import (
    Evaluations,
    check_early_stopping,
    check_evaluation,
    check_schedule,
    evaluates,
    follows_evaluations,
)
from waterflow.integrations.transformers_saving import check_saving
from waterflow.job.job import Job

if TYPE_CHECKING:
    from transformers import Trainer

#: Arguments that the job does as the Trainer's loop would.
TAKEN_OVER = frozenset(
    {
        *("per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules"),
        *("max_grad_norm", "label_smoothing_factor", "bf16", "seed", "data_seed", "use_cache"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
        *("dataloader_multiprocessing_context", "remove_unused_columns", "label_names"),
        *("train_sampling_strategy", "length_column_name", "gradient_accumulation_steps"),
        *("average_tokens_across_devices", "accelerator_config", "use_cpu", "eval_strategy"),
        *("eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
        *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval"),
        *("eval_on_start", "load_best_model_at_end"),
    }
)
#: Arguments that change no number: what is logged, saved, shown and sent where.
WITHOUT_NUMBERS = frozenset(
    {
        *("output_dir", "logging_strategy", "logging_steps", "logging_first_step"),
        *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
        *("save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
        *("save_only_model", "greater_is_better", "metric_for_best_model", "ddp_timeout"),
        *("local_rank", "skip_memory_metrics", "do_train", "do_eval", "do_predict"),
        *("auto_find_batch_size", "torch_empty_cache_steps", "trackio_space_id"),
        *("trackio_bucket_id", "trackio_static_space_id", "ignore_data_skip"),
        *("restore_callback_states_from_checkpoint", "hub_token", "hub_private_repo"),
        *("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    }
)
#: Methods that a subclass may have of its own, as the job calls them where the loop would.
CALLED = frozenset(
    {
        *("compute_loss", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
        *("get_train_dataloader", "_get_train_sampler", "get_decay_parameter_names"),
        *("get_optimizer_cls_and_kwargs", "num_examples", "get_total_train_batch_size"),
    }
)
#: Methods of a subclass that only evaluations call, which are the Trainer's own, and others that no
#: training loop calls.
OWN_OR_UNCALLED = frozenset(
    {
        *("evaluate", "predict", "prediction_step", "evaluation_loop", "get_eval_dataloader"),
        *("get_test_dataloader", "_get_eval_sampler", "save_model", "_save", "create_model_card"),
        *("push_to_hub", "hyperparameter_search", "init_hf_repo"),
    }
)
#: Optimizers whose step is a plain one; others want the learning rate or modes of the Trainer.
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_CALLBACKS = (
    "DefaultFlowCallback",
    "NotebookProgressCallback",
    "PrinterCallback",
    "ProgressCallback",
)


def from_trainer(trainer: Trainer, name: str | None = None, **options: Any) -> Job:
    """The training that ``trainer.train()`` would do, as a job.

    Its losses and weights are, bit for bit, those of ``transformers.set_seed(trainer.args.seed)``
    followed by ``trainer.train()``: the Trainer's own loader, collator, optimizer, schedule, loss,
    clipping, gradient accumulation and evaluations (``eval_strategy``), whose metrics are in the
    job's report and in ``trainer.state.log_history``. With ``load_best_model_at_end`` or
    ``save_strategy="best"`` it writes the models that the loop would (``save_only_model=True``).
    The model is trained in place, and ``trainer.optimizer`` and ``trainer.lr_scheduler`` are the
    job's: afterwards ``trainer.evaluate()`` and ``trainer.save_model()`` work as ever. Else
    logging, saving and reporting are waterflow's.

    Args:
        trainer: one that has not trained yet; of a subclass, too, as far as the methods that it
            overrides are called by the job (``compute_loss``, ``create_optimizer``, ...).
        name: the job's name; None: ``trainer.args.run_name``, or the model's class.
        options: further arguments of `Job`, such as ``on_step`` or ``priority``.

    Raises:
        JobError: the Trainer does something that the job would not do; names it, and the remedy.
        ImportError: transformers is not there; ``pip install 'waterflow[transformers]'``.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise JobError(f"from_trainer takes a transformers.Trainer, got {trainer!r}")
    name = name or trainer.args.run_name or type(trainer.model).__name__
    _check(trainer, name, options)
    trainer.model.train()
    updates = Updates(trainer)
    if evaluates(trainer):
        options.update(Evaluations(trainer, updates).options())
    trainer.create_optimizer_and_scheduler(num_training_steps=updates.count)
    optimizer = cast(torch.optim.Optimizer, trainer.optimizer)
    clipped = trainer.args.max_grad_norm or None
    if trainer.args.gradient_accumulation_steps == 1:
        options.update(optimizer=optimizer, loss=_loss_of(trainer), clip_grad_norm=clipped)
    else:
        options.update(optimizers=[optimizer], step=_step_of(trainer, optimizer, clipped))
    return Job(
        name,
        model=trainer.model,
        modules=Notes(trainer, updates),
        data=updates,
        steps=updates.count,
        scheduler=None if follows_evaluations(trainer) else trainer.lr_scheduler,
        seed=trainer.args.seed,
        **options,
    )


def _step_of(
    trainer: Trainer, optimizer: torch.optim.Optimizer, clipped: float | None
) -> Callable[[Any], torch.Tensor]:
    """A whole update over several batches, each differentiated for itself."""
    # Not the Trainer itself, which counts: what the step encloses, it may read.
    model: Any = trainer.model
    loss_of, is_scaled, device = _loss_of(trainer), _scaling_of(trainer), trainer.args.device

    def step(batches: list[dict[str, Any]]) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for inputs in batches:
            loss = loss_of(model, inputs)
            if not is_scaled(inputs):
                loss = loss / len(batches)
            loss.backward()
            total += loss.detach()
        if clipped is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipped)
        optimizer.step()
        model.zero_grad()
        return total

    return step


def _scaling_of(trainer: Trainer) -> Callable[[Mapping[str, Any]], bool]:
    """Whether the loss of one of several batches is a part of theirs, not a mean of its own."""
    told = trainer.loss_is_scaled_for_ga
    counts, always = bool(trainer.model_accepts_loss_kwargs), trainer.compute_loss_func is not None

    def is_scaled(inputs: Mapping[str, Any]) -> bool:
        return bool(told) if told is not None else always or (counts and ITEMS in inputs)

    return is_scaled


def _loss_of(trainer: Trainer) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The Trainer's loss of inputs; its own method where that does more than ask the model."""
    context = _mixed_precision(trainer)
    if _has_own_loss(trainer):

        def compute_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
            inputs = dict(inputs)
            items = inputs.pop(ITEMS, None)
            loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            return loss

        return compute_loss

    def model_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with context():
            outputs = model(**inputs)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss.float()

    return model_loss


def _has_own_loss(trainer: Trainer) -> bool:
    own = _overrides(trainer, "compute_loss") or trainer.label_smoother is not None
    return own or trainer.compute_loss_func is not None


def _mixed_precision(trainer: Trainer) -> Callable[[], AbstractContextManager[Any]]:
    if not trainer.args.bf16:
        return nullcontext
    device = trainer.args.device.type
    return lambda: torch.autocast(device, dtype=torch.bfloat16)


def _overrides(trainer: Trainer, method: str) -> bool:
    from transformers import Trainer

    known = getattr(Trainer, method)
    return method in vars(trainer) or getattr(type(trainer), method) is not known


def _check(trainer: Trainer, name: str, options: Mapping[str, Any]) -> None:
    """Raises JobError for all that the job would do otherwise than the Trainer's loop."""

    def require(condition: object, what: str, remedy: str) -> None:
        if not condition:
            raise JobError(f"job {name!r}: from_trainer cannot take over {what}: {remedy}")

    taken = {
        "model",
        "modules",
        "optimizer",
        "loss",
        "data",
        "epochs",
        "steps",
        "scheduler",
        "seed",
    }
    for option in sorted(taken & set(options)):
        require(False, f"{option}={options[option]!r}", "it is the Trainer's to say")
    _check_arguments(trainer, require)
    if evaluates(trainer):
        check_evaluation(trainer, options, require)
    _check_methods(trainer, require)
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback).__name__
        module = type(callback).__module__.partition(".")[0]
        if kind == "EarlyStoppingCallback" and module == "transformers":
            check_early_stopping(trainer, callback, require)
            continue
        require(
            kind in _CALLBACKS and module == "transformers",
            f"the callback {kind}",
            "remove it (trainer.remove_callback) and use the job's on_step",
        )
    require(
        trainer.model_init is None,
        "model_init, by which train() makes another model",
        "make the model yourself and give it as model=",
    )
    require(trainer.train_dataset is not None, "a Trainer without train_dataset", "give it one")
    require(
        trainer.state.global_step == 0,
        f"a Trainer that has done {trainer.state.global_step} steps",
        "make a new one; waterflow's own checkpoints go on where a run has stopped",
    )


def _check_arguments(trainer: Trainer, require: Callable[[object, str, str], None]) -> None:
    args = trainer.args
    for field in dataclasses.fields(args):
        if field.name in TAKEN_OVER | WITHOUT_NUMBERS:
            continue
        value, default = getattr(args, field.name), _default(field)
        require(
            value == default or not (value or default),
            f"{field.name}={value!r}",
            f"leave it at {default!r}",
        )
    require(str(args.optim.value) in _OPTIMIZERS, f"optim={args.optim.value!r}", _OPTIMIZER_REMEDY)
    require(
        evaluates(trainer) or not args.eval_on_start,
        "eval_on_start=True without an eval_strategy",
        "set eval_strategy, or evaluate before training (trainer.evaluate())",
    )
    check_saving(trainer, evaluates(trainer), require)
    require(args.world_size == 1, f"{args.world_size} processes", "train in one process")
    require(args.n_gpu <= 1, f"{args.n_gpu} GPUs", "make one visible with CUDA_VISIBLE_DEVICES")
    check_schedule(trainer, require)
    require(
        not (args.bf16 and _has_own_loss(trainer)),
        "bf16=True with a loss that is not the model's own",
        "leave out bf16, or the loss",
    )


_OPTIMIZER_REMEDY = f"take one of {', '.join(_OPTIMIZERS)}, or give optimizers=(...) to the Trainer"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _check_methods(trainer: Trainer, require: Callable[[object, str, str], None]) -> None:
    from transformers import Trainer

    for method, value in vars(Trainer).items():
        if (method.startswith("__") and method != "__call__") or method in CALLED | OWN_OR_UNCALLED:
            continue
        if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
            own = getattr(type(trainer), method, None) is not getattr(Trainer, method)
            require(
                not (own or method in vars(trainer)),
                f"{type(trainer).__name__}.{method}",
                f"the job calls only {', '.join(sorted(CALLED))} of a Trainer's own methods",
            )
