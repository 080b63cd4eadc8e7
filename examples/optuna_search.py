"""A search by Optuna over learning rate and width, its trials side by side in one process.

    python examples/optuna_search.py

Run again, it goes on with the same study, which is kept in a file.
"""

import optuna
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import waterflow as wf

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train = torch.utils.data.TensorDataset(images[:1400], labels[:1400])


def make_job(trial: optuna.Trial) -> wf.Job:
    torch.manual_seed(0)
    width = trial.suggest_int("width", 32, 256, step=32)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    return wf.Job(
        f"trial-{trial.number}",
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), trial.suggest_float("lr", 1e-4, 1, log=True)
        ),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        data=torch.utils.data.DataLoader(train, 128, shuffle=True),
        epochs=8,
        seed=0,
        evaluate=lambda model: (model(images[1400:]).argmax(1) == labels[1400:]).float().mean(),
    )


storage = {"storage": "sqlite:///search.db", "study_name": "digits", "load_if_exists": True}
study = optuna.create_study(direction="maximize", **storage)
wf.optuna.optimize(study, make_job, n_trials=16, memory="64MiB")
print(f"{len(study.trials)} trials, the best {study.best_value:.3f} with {study.best_params}")
