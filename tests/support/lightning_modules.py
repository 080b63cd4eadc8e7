"""LightningModules on digits, and what Lightning's own training comes to."""

import logging
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SEED = 7

#: Marks of all tests with these modules.
MARKS = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*logging interval.*"),
]


def digits(count=100, skipped=0):
    loaded = load_digits()
    images = torch.tensor(loaded.data, dtype=torch.float32)[skipped : skipped + count] / 16
    return TensorDataset(images, torch.tensor(loaded.target)[skipped : skipped + count])


class Digits(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(digits(), 16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(digits(40, 100), 16)


class Classifier(lightning.LightningModule):
    """A classifier of digits by any network."""

    def __init__(self, network=None):
        super().__init__()
        self.network = network or nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.network(images)
        loss = functional.cross_entropy(scores, labels)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean())
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", functional.cross_entropy(self.network(images), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def dropout():
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 10))


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, **quiet, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            accelerator="cpu", devices=1, enable_model_summary=False, **options
        )


def trained_by_host(module, data, **options):
    """The losses of Lightning's own training, and what it found when it validated."""
    losses, found = [], []

    class Recorded(type(module)):
        def backward(self, loss, *arguments, **keywords):
            losses.append(float(loss))
            super().backward(loss, *arguments, **keywords)

        def on_validation_end(self):
            super().on_validation_end()
            if not self.trainer.sanity_checking:
                found.append(float(self.trainer.callback_metrics["val_loss"]))

    module.__class__ = Recorded
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(**options).fit(module, data)
    torch.set_num_threads(before)
    return losses, found


def same_weights(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(one.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
