"""Validation of a LightningModule's job, and what follows it, are as in Lightning's own loop."""

import math

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import waterflow as wf
from tests.support.lightning_modules import (
    MARKS,
    SEED,
    Classifier,
    Digits,
    digits,
    dropout,
    same_weights,
    trained_by_host,
    trainer,
)
from tests.support.tables import crossed, soaked, thinned

lightning = pytest.importorskip("lightning")
EarlyStopping = lightning.pytorch.callbacks.EarlyStopping

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:.*shuffling enabled.*"),
]


class Dropping(Classifier):
    """What it draws in a step is another number where the one before has drawn otherwise."""

    def __init__(self):
        super().__init__(dropout())


class Drawing(Dropping):
    """Its validation draws, too: in hooks and in steps."""

    def on_validation_start(self):
        self.noise = torch.rand(())

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("drawn", self.noise + torch.rand(()))


class Shuffled(Digits):
    def val_dataloader(self):
        return DataLoader(digits(40, 100), 16, shuffle=True)


class Noisy(IterableDataset):
    """Draws for each row, and nobody knows how many there are."""

    def __iter__(self):
        for image, label in digits(90):
            yield image + 0.1 * torch.rand(()), label


class Streamed(Digits):
    def train_dataloader(self):
        return DataLoader(Noisy(), 16)

    def val_dataloader(self):
        return DataLoader(Noisy(), 32)


class Follows(Dropping):
    """Its rate follows the validation's loss."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class FollowsByDict(Follows):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        plateau = {"scheduler": found["lr_scheduler"], "monitor": "val_loss"}
        return {"optimizer": found["optimizer"], "lr_scheduler": plateau}


class OverEstimated(Dropping):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def made(kind):
    torch.manual_seed(3)
    return kind()


def job_of(module, data, name="guest", **options):
    return wf.from_lightning(module, data, trainer(**options), name=name, seed=SEED)


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [
        soaked(Drawing, Digits, {}),
        (Drawing, Shuffled, {}),
        (Dropping, Shuffled, {"limit_val_batches": 1}),
        (Dropping, Digits, {"limit_val_batches": 0.7, "limit_train_batches": 4}),
        (Drawing, Shuffled, {"limit_val_batches": 2, "accumulate_grad_batches": 2}),
        (Follows, Digits, {"max_epochs": 8}),
        (FollowsByDict, Shuffled, {"max_epochs": 8, "limit_train_batches": 3}),
        (OverEstimated, Digits, {"accumulate_grad_batches": 3}),
        soaked(OverEstimated, Digits, {"limit_train_batches": 5}),
        (Drawing, Streamed, {}),
        (Classifier, Streamed, {"accumulate_grad_batches": 4}),
    ],
    ids=lambda given: getattr(given, "__name__", None) or ",".join(given),
)
def test_validation_is_the_hosts(kind, data, options):
    host, guest, beside = made(kind), made(kind), made(kind)
    jobs = [job_of(guest, data(), **options), job_of(beside, data(), "beside", **options)]
    report = wf.run(jobs, memory="64MiB", threads=1)
    report.raise_errors()
    losses, found = trained_by_host(host, data(), **options)
    assert found
    for name, module in (("guest", guest), ("beside", beside)):
        assert [each.values["val_loss"] for each in report[name].evaluations] == found
        if "accumulate_grad_batches" not in options:
            assert report[name].losses == losses
        same_weights(host, module)
    if kind in (Follows, FollowsByDict):
        assert jobs[0].optimizer.param_groups[0]["lr"] == host.optimizers().param_groups[0]["lr"]
        assert jobs[0].optimizer.param_groups[0]["lr"] < 0.1


def test_no_validation_where_none_is_asked_for():
    options = {"limit_val_batches": 0}
    host, guest = made(Dropping), made(Dropping)
    report = wf.run([job_of(guest, Digits(), **options)], memory="64MiB", threads=1)
    assert report["guest"].losses == trained_by_host(host, Digits(), **options)[0]
    assert not report["guest"].evaluations
    same_weights(host, guest)


def stopping(**options):
    callback = EarlyStopping("val_loss", **{"patience": 2, "min_delta": 0.1, **options})
    return {"max_epochs": 30, "callbacks": [callback]}


LIMITS = [
    {},
    {"mode": "max", "patience": 1},
    {"stopping_threshold": 1.5},
    {"divergence_threshold": 1.0},
    {"check_on_train_epoch_end": False},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    crossed([Dropping, Follows], LIMITS),
    ids=lambda given: getattr(given, "__name__", None) or ",".join(given) or "patience",
)
def test_early_stopping_stops_where_the_host_does(kind, options):
    host, guest = made(kind), made(kind)
    ours, theirs = stopping(**options), stopping(**options)
    report = wf.run([job_of(guest, Shuffled(), **ours)], memory="64MiB", threads=1)
    report.raise_errors()
    losses, found = trained_by_host(host, Shuffled(), **theirs)
    assert report["guest"].losses == losses
    assert report["guest"].state == "stopped"
    assert [each.values["val_loss"] for each in report["guest"].evaluations] == found
    assert len(found) < 30
    assert ours["callbacks"][0].state_dict() == theirs["callbacks"][0].state_dict()
    same_weights(host, guest)


@pytest.mark.parametrize("stop", thinned([3, 7, 8, 16, 22], keep=2))
def test_a_training_that_goes_on_is_the_hosts(stop, tmp_path):
    class Counting(Follows):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0.9**self.current_epoch

    def run(module, on_step=None):
        found = trainer(**stopping(min_delta=0.02))
        job = wf.from_lightning(module, Shuffled(), found, name="a", seed=SEED, on_step=on_step)
        keep = {"checkpoint": tmp_path, "checkpoint_every": "1 steps", "resume": tmp_path}
        return wf.run([job], "64MiB", threads=1, **keep)

    def fail_there(result):
        if result.step == stop:
            raise RuntimeError

    host, guest = made(Counting), made(Counting)
    with pytest.warns(wf.JobFailedWarning):
        run(made(Counting), fail_there)
    report = run(guest)
    report.raise_errors()
    limits = stopping(min_delta=0.02)
    losses, found = trained_by_host(host, Shuffled(), **limits)
    assert report["a"].resumed_steps == stop - 1
    assert report["a"].losses == losses
    assert [each.values["val_loss"] for each in report["a"].evaluations] == found
    same_weights(host, guest)


def test_draws_that_would_be_in_another_order_are_an_error():
    job = job_of(made(Dropping), Streamed(), accumulate_grad_batches=2)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], memory="64MiB")
    assert "its data draw random numbers and so do its steps" in report["guest"].error


class Unlogged(Dropping):
    def validation_step(self, batch, batch_idx):
        self.log("other", torch.zeros(()))


class LoggedTwice(Dropping):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("val_loss", loss)
        return loss


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Unlogged, "EarlyStopping monitors 'val_loss', but validation logs 'other'"),
        (LoggedTwice, "EarlyStopping monitors 'val_loss', which training_step logs, too"),
    ],
)
def test_a_metric_that_would_be_another_is_an_error(kind, named):
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job_of(made(kind), Digits(), **stopping())], memory="64MiB")
    assert named in report["guest"].error


def nothing(module):
    return math.nan


class NoValidation(Follows):
    validation_step = lightning.LightningModule.validation_step


class BySteps(Follows):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        plateau = {"scheduler": found["lr_scheduler"], "monitor": "val_loss", "interval": "step"}
        return {"optimizer": found["optimizer"], "lr_scheduler": plateau}


class Unnamed(Follows):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        return [found["optimizer"]], [found["lr_scheduler"]]


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (NoValidation, {}, "ReduceLROnPlateau without validation"),
        (BySteps, {}, "ReduceLROnPlateau with interval='step'"),
        (Unnamed, {}, "ReduceLROnPlateau without monitor"),
        (Dropping, {"evaluate": nothing}, "evaluate="),
        (Dropping, {"evaluate_every": 3}, "evaluate_every=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_taken_over_is_refused_by_name(kind, options, named):
    with pytest.raises(wf.JobError, match="job 'mine': from_lightning cannot take over") as refused:
        wf.from_lightning(kind(), Digits(), trainer(), name="mine", **options)
    assert named in str(refused.value)
