"""Each hook of a LightningModule and each argument of a Trainer: done as Lightning does it, refused
by name, or without effect on numbers; a new one of another Lightning fails here."""

import inspect

import pytest
import torch

import waterflow as wf
from tests.support.lightning_modules import (
    MARKS,
    SEED,
    Classifier,
    Digits,
    dropout,
    same_weights,
    trained_by_host,
    trainer,
)

lightning = pytest.importorskip("lightning")
callbacks = lightning.pytorch.callbacks

pytestmark = MARKS

#: Hooks that are called at Lightning's moments.
CALLED = {
    *("on_fit_start", "on_train_start", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "setup", "prepare_data"),
    *("configure_model", "train_dataloader", "val_dataloader", "configure_optimizers"),
}
#: Hooks of what a job does not do: testing and predicting.
ELSEWHERE = {
    *("test_dataloader", "predict_dataloader"),
    *(f"on_{what}_{when}" for what in ("test", "predict") for when in ("start", "end")),
    *(f"on_{what}_epoch_{when}" for what in ("test", "predict") for when in ("start", "end")),
    *(f"on_{what}_batch_{when}" for what in ("test", "predict") for when in ("start", "end")),
    *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval"),
}
#: Hooks that are refused.
REFUSED = {
    *("on_fit_end", "on_train_end", "on_train_batch_start", "on_train_batch_end", "teardown"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_model_zero_grad", "on_validation_model_eval"),
    *("on_validation_model_train", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_sharded_model"),
    *("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"),
    *("on_load_checkpoint", "on_save_checkpoint", "configure_callbacks", "backward"),
    *("configure_gradient_clipping", "clip_gradients", "optimizer_step", "optimizer_zero_grad"),
    *("lr_scheduler_step", "log", "log_dict", "manual_backward", "optimizers", "lr_schedulers"),
}
MODULES_OWN = {
    *("backward", "configure_callbacks", "configure_gradient_clipping", "clip_gradients", "log"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "log_dict", "lr_schedulers"),
    *("manual_backward", "optimizers", "configure_optimizers"),
}


def overriding(hook, kind=Classifier):
    """A module or datamodule whose hook draws a random number, so that its moment matters."""

    def drawing(self, *arguments, **options):
        if not self.trainer.sanity_checking:
            torch.rand(1)
        return getattr(kind, hook)(self, *arguments, **options)

    drawing.__signature__ = inspect.signature(getattr(kind, hook))
    return type("Own", (kind,), {hook: drawing})


def test_every_hook_is_in_the_table():
    from lightning.pytorch.core import hooks

    kinds = (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    known = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    assert known | MODULES_OWN == CALLED | ELSEWHERE | REFUSED
    assert not CALLED & REFUSED


@pytest.mark.parametrize("hook", sorted(REFUSED))
def test_a_hook_that_is_not_called_is_refused_by_name(hook):
    with pytest.raises(wf.JobError, match=f"'mine'.*Own.{hook}: ") as refused:
        wf.from_lightning(overriding(hook)(), Digits(), trainer(), name="mine")
    assert not str(refused.value).endswith(": ")


@pytest.mark.parametrize("hook", sorted(hook for hook in CALLED if "on_validation" in hook))
def test_a_hook_is_called_when_lightning_calls_it(hook):
    def made():
        torch.manual_seed(3)
        return overriding(hook)(dropout())

    host, guest = made(), made()
    job = wf.from_lightning(guest, Digits(), trainer(), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)
    assert report["guest"].error is None
    losses, found = trained_by_host(host, Digits())
    assert report["guest"].losses == losses
    assert [each.values["val_loss"] for each in report["guest"].evaluations] == found
    same_weights(host, guest)


@pytest.mark.parametrize(
    "hook",
    [
        *("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"),
        *("teardown", "state_dict", "load_state_dict"),
    ],
)
def test_a_datamodules_hook_is_refused_by_name(hook):
    with pytest.raises(wf.JobError, match=f"'mine'.*Own.{hook}: "):
        wf.from_lightning(Classifier(), overriding(hook, Digits)(), trainer(), name="mine")


#: Arguments of a Trainer that the job takes over.
TAKEN_OVER = {
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "precision"),
    *("val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches", "callbacks"),
    *("gradient_clip_val", "default_root_dir", "gradient_clip_algorithm"),
}
#: Arguments that change no number in one process, or that Lightning sets for the whole process.
WITHOUT_NUMBERS = {
    *("accelerator", "logger", "limit_test_batches", "limit_predict_batches", "profiler"),
    *("num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "inference_mode"),
    *("enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
    *("deterministic", "benchmark", "sync_batchnorm", "enable_autolog_hparams"),
}


class OwnPrecision(lightning.pytorch.plugins.Precision):
    pass


#: A value of each argument that is refused, and how it is named.
REFUSED_ARGUMENTS = {
    "num_nodes": (None, "num_nodes=2"),
    "devices": (None, "num_devices=2"),
    "strategy": (None, "strategy DDPStrategy"),
    "fast_dev_run": (True, "fast_dev_run=True"),
    "min_epochs": (3, "min_epochs=3"),
    "min_steps": (3, "min_steps=3"),
    "max_time": ("00:00:10:00", "Timer(duration=...)"),
    "overfit_batches": (2, "overfit_batches=2"),
    "detect_anomaly": (True, "detect_anomaly=True"),
    "barebones": (True, "barebones=True"),
    "plugins": (OwnPrecision(), "precision_plugin OwnPrecision"),
    "reload_dataloaders_every_n_epochs": (1, "reload_dataloaders_every_n_epochs=1"),
    "model_registry": ("mine", "model_registry='mine'"),
}


def test_every_argument_of_a_trainer_is_in_the_table():
    known = set(inspect.signature(lightning.Trainer).parameters)
    assert TAKEN_OVER | WITHOUT_NUMBERS | set(REFUSED_ARGUMENTS) == known


@pytest.mark.parametrize(
    "argument", [name for name, (value, _) in REFUSED_ARGUMENTS.items() if value is not None]
)
def test_an_argument_that_is_not_taken_over_is_refused_by_name(argument):
    value, named = REFUSED_ARGUMENTS[argument]
    if argument == "barebones":
        given = lightning.Trainer(accelerator="cpu", max_epochs=1, barebones=True)
    else:
        given = trainer(**{argument: value})
    with pytest.raises(wf.JobError, match="from_lightning cannot take over") as refused:
        wf.from_lightning(Classifier(), Digits(), given, name="mine")
    assert named in str(refused.value)


def test_a_strategy_of_several_processes_is_refused_by_name():
    given = trainer(strategy="ddp")
    with pytest.raises(wf.JobError, match="strategy DDPStrategy"):
        wf.from_lightning(Classifier(), Digits(), given, name="mine")


EARLY = (
    *("setup", "prepare_data", "configure_model", "on_fit_start", "on_train_start"),
    *("train_dataloader", "val_dataloader", "configure_optimizers"),
)


@pytest.mark.parametrize("hook", EARLY)
def test_a_hook_before_the_training_that_draws_is_refused(hook):
    """Its numbers would come from another stream than Lightning's, and leave the job's alone."""

    def drawing(self, *arguments):
        torch.rand(())
        return getattr(super(type(self), self), hook)(*arguments)

    name = rf"{hook}\(\) that draws random numbers: .* a generator of your own"
    data = Digits()
    if hook.endswith("dataloader"):
        data = type("Drawing", (Digits,), {hook: drawing})()
        module = Classifier()
    else:
        module = type("Drawing", (Classifier,), {hook: drawing})()
    with pytest.raises(wf.JobError, match=name):
        wf.from_lightning(module, data, trainer(max_epochs=1), seed=SEED)
