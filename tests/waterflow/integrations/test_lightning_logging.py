"""What a LightningModule logs is, by every option of `self.log`, what Lightning makes of it."""

import inspect
import re

import pytest
import torch
from torch.nn import functional

import waterflow as wf
from tests.support.lightning_modules import (
    MARKS,
    SEED,
    Classifier,
    Digits,
    trained_by_host,
    trainer,
)

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = MARKS

#: Options of `self.log` in validation_step, of values that differ from batch to batch.
OPTIONS = {
    "none": {},
    "prog_bar": {"prog_bar": True},
    "logger": {"logger": False},
    "on_step": {"on_step": True},
    "not on_step": {"on_step": False, "on_epoch": True},
    "min": {"reduce_fx": "min"},
    "max": {"reduce_fx": torch.max},
    "sum": {"reduce_fx": sum},
    "avg": {"reduce_fx": "AVG"},
    "graph": {"enable_graph": True},
    "sync_dist": {"sync_dist": True, "sync_dist_group": None},
    "dataloader": {"add_dataloader_idx": False},
    "batch_size": {"batch_size": 1},
    "rank_zero_only": {"rank_zero_only": True},
}


class Logging(Classifier):
    """Logs by one option in validation, and numbers of other types."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.several = torchmetrics.MetricCollection(
            [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()], prefix="val_"
        )

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.network(images)
        self.log("val_loss", functional.cross_entropy(scores, labels), **self.options)
        self.log_dict({"val_half": scores.mean().bfloat16(), "val_int": batch_idx}, **self.options)
        self.accuracy(scores, labels)
        self.log("val_accuracy", self.accuracy, metric_attribute="accuracy")
        self.several(scores.max(1).values, labels.float())
        self.log_dict(self.several)
        self.log("val_twice", batch_idx * 3.0)
        self.log("val_twice", batch_idx * 7.0)

    def on_validation_start(self):
        self.log("val_start", 4.0)
        self.log("val_hooks", 1.0)

    def on_validation_epoch_start(self):
        self.log("val_hooks", 2.0)
        self.log("val_overwritten", 0.5)

    def on_validation_epoch_end(self):
        self.log("val_end", 5.0)
        self.log("val_overwritten", 0.25)


def made(options):
    torch.manual_seed(3)
    return Logging(options)


def found_by_host(module):
    found = {}

    class Noting(type(module)):
        def on_train_end(self):
            found.update(self.trainer.callback_metrics)

    module.__class__ = Noting
    trained_by_host(module, Digits(), max_epochs=2)
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_validations_numbers_are_the_hosts(option):
    guest, host = made(OPTIONS[option]), made(OPTIONS[option])
    job = wf.from_lightning(guest, Digits(), trainer(), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)
    assert report["guest"].error is None
    wanted = found_by_host(host)
    by_step = {name for name in wanted if name.endswith("_step")} | {"accuracy"}
    assert report["guest"].evaluations[-1].values == {
        name: value for name, value in wanted.items() if name not in by_step
    }


def test_every_option_of_log_is_tried():
    known = set(inspect.signature(lightning.LightningModule.log).parameters)
    tried = {name for options in OPTIONS.values() for name in options}
    assert known - tried == {"self", "name", "value", "metric_attribute"}


class StepsAndEpochs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=3)
        return loss


def test_a_training_steps_values_are_those_of_each_step():
    torch.manual_seed(3)
    job = wf.from_lightning(StepsAndEpochs(), Digits(), trainer(), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)["guest"]
    assert report.metrics["loss"] == report.losses
    assert set(report.metrics["loss_batch_size"]) == {3.0}


class Averaging(Classifier):
    """Logs by epochs, in batches of two sizes and numbers of several types."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.network(images)
        loss = functional.cross_entropy(scores, labels)
        right = (scores.argmax(1) == labels).float().mean()
        self.log("accuracy", right, on_step=True, on_epoch=True)
        self.log("half", scores.mean().bfloat16(), on_epoch=True, on_step=False)
        self.log_dict({"train_loss": loss}, on_epoch=True)
        self.log("own", loss * 3, on_epoch=True, batch_size=5)
        return loss


def test_means_over_epochs_are_the_hosts():
    wanted = []

    class Noting(Averaging):
        def on_train_epoch_end(self):
            wanted.append({name: float(v) for name, v in self.trainer.callback_metrics.items()})

        def on_train_end(self):
            wanted.append({name: float(v) for name, v in self.trainer.callback_metrics.items()})

    torch.manual_seed(3)
    guest = Averaging()
    torch.manual_seed(3)
    trained_by_host(Noting(), Digits(), max_epochs=3)
    job = wf.from_lightning(guest, Digits(), trainer(max_epochs=3), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)["guest"]
    assert report.captured == "captured", report.notes
    by_size = report.epoch_means("batch_size", precision="float32")
    own = report.epoch_means("own_batch_size", precision="float32")
    assert len(by_size) == 3
    for name in ("accuracy", "half", "train_loss"):
        host = f"{name}_epoch" if name == "accuracy" else name
        assert by_size[-1][name] == wanted[-1][host], name
    assert own[-1]["own"] == wanted[-1]["own"]


class MetricInTraining(Classifier):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(1.0)
        self.log("mean", self.mean)
        return loss


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (MetricInTraining, "'mean'.*a metric of torchmetrics in training_step"),
        (lambda: Logging({"reduce_fx": "median"}), "'val_loss'.*reduce_fx='median'.*mean, min"),
        (lambda: Logging({"on_step": True, "on_epoch": False}), "'val_loss'.*on_epoch=False"),
        (lambda: Logging({"on_step": False, "on_epoch": False}), "on_step=False, on_epoch=False"),
        (lambda: Logging({"newer": 1}), "newer"),
    ],
)
def test_what_is_not_taken_over_is_an_error(module, named):
    job = wf.from_lightning(module(), Digits(), trainer(), name="guest", seed=SEED)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], memory="64MiB", threads=1)
    assert report["guest"].error is not None
    assert re.search(named, report["guest"].error, re.DOTALL), report["guest"].error
