"""Optuna's trials side by side: waterflow against Optuna's own threads and processes.

    python -m benchmarks.optuna
    python -m benchmarks.optuna --json --trials 16 --repeats 1

Sixty-four trials of a perceptron on scikit-learn's digits, the same ones for each way: plain
training in `study.optimize(n_jobs=2)`, in two processes that share a study in a file, and
`waterflow.optuna`. Each way runs in a process of its own, timed from after its imports to its last
trial, with one intra-op thread for each trial; ways are interleaved, and medians told. Trials that
waterflow has run are compared with the plain loop, by bits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

EPOCHS, BATCH, WIDTHS = 12, 64, (64, 128, 256)
Params = dict[str, Any]
Values = dict[int, list[float]]  # of each trial, by its number: what its evaluations found


class Digits:
    """The data, read once."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)
        self.train = TensorDataset(self.images[:1408], self.labels[:1408])

    def accuracy(self, model: nn.Module) -> float:
        found = model(self.images[1408:]).argmax(1) == self.labels[1408:]
        return found.float().mean().item()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def build(params: Params) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = params["width"]
    model = nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)),
        *(nn.ReLU(), nn.Linear(width, 10)),
    )
    return model, torch.optim.AdamW(model.parameters(), params["rate"])


def suggest(trial: optuna.Trial) -> Params:
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    return {"rate": rate, "width": trial.suggest_categorical("width", WIDTHS)}


def study_of(trials: int, **options: Any) -> optuna.Study:
    """A study in which these trials wait."""
    study = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.NopPruner(), study_name="digits", **options
    )
    draw = random.Random(0)
    for _ in range(trials):
        study.enqueue_trial({"rate": 10 ** draw.uniform(-4, -1), "width": draw.choice(WIDTHS)})
    return study


def plain_objective(digits: Digits) -> Callable[[optuna.Trial], float]:
    """The loop as users of Optuna write it."""

    def objective(trial: optuna.Trial) -> float:
        model, optimizer = build(suggest(trial))
        found = 0.0
        for epoch in range(EPOCHS):
            model.train()
            for batch in DataLoader(digits.train, BATCH, shuffle=True):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                found = digits.accuracy(model)
            trial.report(found, epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return found

    return objective


def job_of(digits: Digits, name: str, params: Params) -> wf.Job:
    model, optimizer = build(params)
    return wf.Job(
        name,
        model=model,
        optimizer=optimizer,
        loss=loss,
        data=DataLoader(digits.train, BATCH, shuffle=True),
        epochs=EPOCHS,
        seed=0,
        evaluate=digits.accuracy,
    )


def in_threads(digits: Digits, trials: int) -> None:
    study_of(trials).optimize(plain_objective(digits), n_trials=trials, n_jobs=2)


def _storage(path: str) -> optuna.storages.BaseStorage:
    """A study in a file: as a journal, since two processes may take the same trial from SQLite."""
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))


def _process(digits: Digits, path: str, trials: int) -> None:
    pruner = optuna.pruners.NopPruner()  # a study in a file has none of its own
    study = optuna.load_study(study_name="digits", storage=_storage(path), pruner=pruner)
    study.optimize(plain_objective(digits), n_trials=trials)


def in_processes(digits: Digits, trials: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/study.log"
        study_of(trials, storage=_storage(path))
        context = multiprocessing.get_context("fork")
        shares = (trials // 2, trials - trials // 2)
        processes = [
            context.Process(target=_process, args=(digits, path, share)) for share in shares
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a process of plain Optuna has failed")


def in_waterflow(digits: Digits, trials: int) -> wf.Report:
    return wf.optuna.optimize(
        study_of(trials),
        lambda trial: job_of(digits, f"trial-{trial.number}", suggest(trial)),
        *(trials, "256MiB"),
        threads=1,
    )


def is_equal_to_solo(digits: Digits, report: wf.Report, trials: int) -> bool:
    """Whether each trial's losses and evaluations are those of the plain loop alone."""
    study = study_of(trials)
    for number in range(trials):
        job = job_of(digits, f"trial-{number}", suggest(study.ask()))
        alone, found = wf.run_eager(job, threads=1), report[job.name]
        if (found.losses, found.evaluations) != (alone.losses, alone.evaluations):
            return False
    return True


WAYS: dict[str, Callable[[Digits, int], Any]] = {
    "plain_threads": in_threads,
    "plain_processes": in_processes,
    "waterflow": in_waterflow,
}


def run_one(way: str, trials: int, compares: bool) -> dict[str, Any]:
    """One way, in this process."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    digits = Digits()
    wf.Engine("1MiB", threads=1).close()  # what is imported at first use, for every way alike
    model, optimizer = build(suggest(study_of(1).ask()))
    loss(model, (digits.images[:1], digits.labels[:1])).backward()
    optimizer.step()  # torch's first one imports its compiler
    started, before = time.perf_counter(), os.times()
    outcome = WAYS[way](digits, trials)
    seconds, after = time.perf_counter() - started, os.times()
    found: dict[str, Any] = {"seconds": seconds, "cpu_seconds": sum(after[:4]) - sum(before[:4])}
    if way == "waterflow" and compares:
        found["equal_to_solo"] = is_equal_to_solo(digits, outcome, trials)
    return found


def run_apart(way: str, trials: int, compares: bool) -> dict[str, Any]:
    """One way, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.optuna", "--one", way, "--trials", str(trials)]
    command += ["--compare"] if compares else []
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(ended.stdout))


def measure(trials: int, repeats: int) -> dict[str, Any]:
    """All ways, interleaved."""
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS:
            rows[way].append(run_apart(way, trials, compares=repeat == 0))
    found: dict[str, Any] = {"trials": trials, "repeats": repeats}
    for way, measured in rows.items():
        for unit in ("seconds", "cpu_seconds"):
            found[f"{way}_{unit}"] = statistics.median(row[unit] for row in measured)
    found["equal_to_solo"] = rows["waterflow"][0]["equal_to_solo"]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_one(options.one, options.trials, options.compare)))
        return
    found = measure(options.trials, options.repeats)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for way in WAYS:
        cpu = found[f"{way}_cpu_seconds"]
        seconds = found[f"{way}_seconds"]
        print(f"{way.replace('_', ' '):16} {seconds:7.2f} s, of processors {cpu:.2f} s")
    print(f"equal to solo: {found['equal_to_solo']}")


if __name__ == "__main__":
    main()
