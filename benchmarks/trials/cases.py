"""The rows of the benchmark."""

from __future__ import annotations

import functools

from benchmarks.trials import digits, models, text
from benchmarks.trials.case import Case, JobsCase

_ARCHITECTURES = {
    "mlp": (models.mlp, 64),
    "cnn": (models.cnn, 32),
    "gru": (models.Unrolled, 32),
    "transformer": (models.Transformer, 64),
}


def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    cases: list[Case] = [
        digits.SearchCase(),
        JobsCase(name="folds", make=digits.fold_job, steps=92, numbers=range(digits.FOLDS)),
        JobsCase(name="tiny", make=digits.tiny_job, steps=30, numbers=range(200), stackable=True),
    ]
    cases.append(JobsCase(name="gans", make=models.gan_job, steps=300, numbers=range(8)))
    for lengths in (30, 70):
        make = functools.partial(text.lengths_job, lengths)
        cases.append(JobsCase(name=f"lengths-{lengths}", make=make, steps=300, numbers=range(2)))
    for trials in (8, 64):
        for name, (architecture, size) in _ARCHITECTURES.items():
            cases.append(
                JobsCase(
                    name=f"{name}-{trials}",
                    make=models.make_trial(architecture, size),
                    steps=300,
                    numbers=range(trials),
                    stackable=True,
                )
            )
    return {case.name: case for case in cases}
