"""Trials on scikit-learn's digits: cross-validation, tiny jobs, and a search by Optuna."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import waterflow as wf
from benchmarks.trials.case import Size, Train

FOLDS = 5
BATCH = 64
#: Trials of the search that are asked for together: none of them sees how the others end, so that
#: every way of running them prunes the same trials.
ASKED_TOGETHER = 8


@functools.cache
def digits() -> TensorDataset:
    """1,797 images of 8 x 8 and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    return TensorDataset(images, torch.tensor(found.target))


def split(fold: int) -> tuple[Subset[Any], Subset[Any]]:
    """The fold's training and validation images."""
    order = torch.randperm(len(digits()), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = set(order[fold::FOLDS])
    training = [index for index in order if index not in held_out]
    return Subset(digits(), training), Subset(digits(), order[fold::FOLDS])


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def after_epochs(
    model: nn.Module, fold: int, steps: int, report: Callable[[float, int], Any]
) -> wf.job.job.StepCallback:
    """A callback that reports the accuracy after each epoch of so many steps."""
    held_out = split(fold)[1]
    images, labels = digits()[held_out.indices]

    def on_step(step: wf.StepResult) -> Any:
        if step.step % steps == 0:
            return report(accuracy(model, images, labels), step.epoch)
        return None

    return on_step


def loader(fold: int) -> DataLoader[Any]:
    return DataLoader(split(fold)[0], batch_size=BATCH, shuffle=True)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def fold_job(fold: int, steps: int) -> wf.Job:
    torch.manual_seed(fold)
    model = cnn()
    data = loader(fold)
    accuracies: list[float] = []

    def keep(value: float, epoch: int) -> None:
        accuracies.append(value)

    return wf.Job(
        f"fold-{fold}",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=classify,
        data=data,
        steps=steps,
        seed=fold,
        on_step=after_epochs(model, fold, len(data), keep),
    )


def tiny_job(number: int, steps: int) -> wf.Job:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    images, labels = digits().tensors
    data = [(images[at : at + 32], labels[at : at + 32]) for at in range(0, 32 * 30, 32)]
    return wf.Job(
        f"tiny-{number}",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01 * (1 + number), momentum=0.9),
        loss=classify,
        data=data,
        steps=steps,
        seed=number,
    )


@dataclass(frozen=True, kw_only=True)
class SearchCase:
    """A search over widths, depths, dropout and learning rates, with pruning by Optuna."""

    name: str = "optuna"
    trials: int = 24
    steps: int = 184  # 8 epochs of 23
    stackable: bool = False
    asks: bool = True
    together: int = ASKED_TOGETHER

    def sized(self, size: Size) -> SearchCase:
        return replace(self, trials=size.trials(self.trials), steps=size.steps(self.steps))

    def part(self, index: int, parts: int) -> SearchCase:
        """A study of its own, of as many trials: processes share nothing."""
        trials = len(range(index, self.trials, parts))
        return replace(self, trials=trials, together=max(1, self.together // parts))

    def prepare(self) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        digits()

    def run(self, train: Train) -> list[list[float]]:
        import optuna

        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
        )
        losses: list[list[float]] = []
        while len(study.trials) < self.trials:
            count = min(self.together, self.trials - len(study.trials))
            asked = [study.ask() for _ in range(count)]
            pruned: set[int] = set()
            losses += train([search_job(trial, self.steps, pruned) for trial in asked])
            for trial in asked:
                was = trial.number in pruned
                state = optuna.trial.TrialState.PRUNED if was else None
                study.tell(trial, None if was else last_report(study, trial), state=state)
        return losses


def last_report(study: Any, trial: Any) -> float:
    """The accuracy after the trial's last whole epoch; 0 where there was none."""
    reports = study.trials[trial.number].intermediate_values
    return reports[max(reports)] if reports else 0.0


def search_job(trial: Any, steps: int, pruned: set[int]) -> wf.Job:
    width = trial.suggest_int("width", 32, 256, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
    torch.manual_seed(trial.number)
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )
    data = loader(0)

    def report(value: float, epoch: int) -> Any:
        trial.report(value, epoch)
        if not trial.should_prune():
            return None
        pruned.add(trial.number)
        return wf.STOP

    return wf.Job(
        f"trial-{trial.number}",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        loss=classify,
        data=data,
        steps=steps,
        seed=trial.number,
        on_step=after_epochs(model, 0, len(data), report),
    )
