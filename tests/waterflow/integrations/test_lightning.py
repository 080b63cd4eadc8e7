"""A LightningModule's training as a job has the bits of Lightning's own loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

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

lightning = pytest.importorskip("lightning")
callbacks = lightning.pytorch.callbacks

pytestmark = MARKS


class Plain(Classifier):
    validation_step = lightning.LightningModule.validation_step


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, 0.2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class ByEpoch(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Annealed(Classifier):
    """Its loss depends on the epoch and the step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss * 0.5**self.current_epoch * (1 + 0.01 * self.global_step)}


class Counting(Classifier):
    """Its loss depends on the batch's number."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class Noisy(Classifier):
    def training_step(self, batch, batch_idx):
        images, labels = batch
        return super().training_step((images + 0.1 * torch.randn_like(images), labels), batch_idx)


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
        self.decoder = nn.Linear(8, 64)

    def training_step(self, batch):
        images, _ = batch
        loss = functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log_dict({"error": loss, "squared": loss**2})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, images):
        return self.head(self.cell(images.view(-1, 8, 8))[0][:, -1])


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 10),
    )


def attention():
    return nn.Sequential(
        nn.Unflatten(1, (8, 8)),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


MODULES = {
    "mlp": Classifier,
    "dropout": lambda: Classifier(dropout()),
    "cnn": lambda: Classifier(convolutional()),
    "gru": lambda: Classifier(Recurrent()),
    "attention": lambda: Classifier(attention()),
    "scheduled": Scheduled,
    "by_epoch": ByEpoch,
    "annealed": Annealed,
    "counting": Counting,
    "noisy": Noisy,
    "autoencoder": Autoencoder,
}


def made(name):
    torch.manual_seed(3)
    return MODULES[name]()


@pytest.fixture(scope="module")
def side_by_side():
    """All modules trained in one call."""
    modules = {name: made(name) for name in MODULES}
    jobs = [
        wf.from_lightning(module, Digits(), trainer(), name=name, seed=SEED)
        for name, module in modules.items()
    ]
    return wf.run(jobs, memory="256MiB", threads=1), modules


@pytest.mark.parametrize("name", MODULES)
def test_modules_side_by_side_train_as_by_their_host(name, side_by_side):
    report, modules = side_by_side
    assert report[name].error is None
    assert report[name].captured == "captured", report[name].notes
    host = made(name)
    losses, found = trained_by_host(host, Digits())
    assert report[name].losses == losses
    assert len(losses) == 14
    same_weights(host, modules[name])
    evaluations = [evaluation.values["val_loss"] for evaluation in report[name].evaluations]
    assert evaluations == found
    assert len(found) == (0 if name == "autoencoder" else 2)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": -1, "max_steps": 9},
        {"gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5, "accumulate_grad_batches": 2},
    ],
    ids=lambda options: ",".join(options),
)
def test_a_trainers_arguments_do_what_they_do_in_the_host(options):
    host, guest = made("dropout"), made("dropout")
    job = wf.from_lightning(guest, Digits(), trainer(**options), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)
    assert report["guest"].error is None
    losses, _ = trained_by_host(host, Digits(), **options)
    if "accumulate_grad_batches" not in options:
        assert report["guest"].losses == losses
    same_weights(host, guest)


def test_what_is_logged_are_metrics():
    module = made("autoencoder")
    job = wf.from_lightning(module, DataLoader(digits(), 20), epochs=1, name="a")
    report = wf.run([job], memory="64MiB", threads=1)["a"]
    assert report.metrics["error"] == report.losses
    assert len(report.metrics["squared"]) == 5


def test_a_module_with_its_own_loader_and_no_trainer():
    class Own(Plain):
        def train_dataloader(self):
            return DataLoader(digits(), 16, shuffle=True)

    torch.manual_seed(3)
    host = Own()
    torch.manual_seed(3)
    guest = Own()
    report = wf.run([wf.from_lightning(guest, epochs=2, seed=SEED)], memory="64MiB", threads=1)
    assert report["Own"].losses == trained_by_host(host, None)[0]
    same_weights(host, guest)


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Adversaries(Plain):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class LogsEarly(Plain):
    def on_train_start(self):
        self.log("started", 1.0)


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (LogsEarly, {}, "self.log in on_train_start()"),
        (Manual, {}, "Manual's manual optimization"),
        (Hooked, {}, "Hooked.on_train_batch_end"),
        (Adversaries, {}, "2 optimizers"),
        (Plain, {"precision": "64-true"}, "precision='64-true'"),
        (
            Plain,
            {
                "callbacks": [callbacks.ModelCheckpoint(every_n_train_steps=3)],
                "enable_checkpointing": True,
            },
            "ModelCheckpoint(every_n_train_steps=3)",
        ),
        (Plain, {"callbacks": [callbacks.Timer("00:00:10:00")]}, "Timer(duration=...)"),
        (Plain, {"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]}, "Accumulation"),
        (Plain, {"limit_train_batches": 0.01}, "limit_train_batches=0.01"),
        (Plain, {"max_epochs": -1}, "without an end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_taken_over_is_refused_by_name(module, options, named):
    with pytest.raises(wf.JobError, match="from_lightning cannot take over") as refused:
        wf.from_lightning(module(), Digits(), trainer(**options), name="mine")
    assert named in str(refused.value)
    assert "'mine'" in str(refused.value)


class Prepared(Plain):
    """Built from what its trainer and its data's say before there is a loader."""

    def __init__(self):
        super().__init__(nn.Linear(64, 24))

    def setup(self, stage):
        self.factor = 1 / (self.trainer.max_epochs + self.trainer.world_size)

    def configure_model(self):
        if self.trainer.is_global_zero and self.current_epoch == 0:
            with torch.random.fork_rng():
                torch.manual_seed(2)
                self.network = nn.Sequential(self.network, nn.ReLU(), nn.Linear(24, 10))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


class ByRank(Digits):
    def prepare_data(self):
        self.rank = self.trainer.global_rank

    def setup(self, stage):
        self.size = 10 * self.trainer.max_epochs + self.rank

    def train_dataloader(self):
        return DataLoader(digits(), self.size, shuffle=True)


def test_hooks_before_the_training_find_their_trainer():
    torch.manual_seed(1)
    host = Prepared()
    torch.manual_seed(1)
    guest = Prepared()
    losses, _ = trained_by_host(host, ByRank())
    job = wf.from_lightning(guest, ByRank(), trainer(), name="guest", seed=SEED)
    report = wf.run([job], memory="64MiB", threads=1)
    assert report["guest"].losses == losses
    same_weights(host, guest)


def test_a_loader_that_is_not_made_yet_has_no_batches():
    class Early(Plain):
        def setup(self, stage):
            self.total = self.trainer.estimated_stepping_batches

    with pytest.raises(wf.JobError, match=r"'early': .* before its loader is made"):
        wf.from_lightning(Early(), Digits(), trainer(), name="early")


def test_what_a_module_asks_its_trainer_for_is_never_made_up():
    class Asking(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.trainer.num_val_batches[0]

    job = wf.from_lightning(Asking(), Digits(), epochs=1, name="asking")
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], memory="64MiB")
    assert "num_val_batches" in report["asking"].error


def epoch_of(module):
    return module.current_epoch


def test_an_epoch_that_is_asked_for_elsewhere_is_never_made_up():
    class Hidden(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, 0) * 0.5 ** epoch_of(self)

    loader = DataLoader(digits(), 20)
    job = wf.from_lightning(Hidden(), loader, epochs=2, name="hidden")
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([job], memory="64MiB")
    assert "current_epoch" in report["hidden"].error
