"""A suite whose cases train, die and hang, for the benchmark of coverage."""

from __future__ import annotations

import ctypes
import time

import torch

import waterflow as wf
from benchmarks.coverage.suites import Suite
from benchmarks.coverage.trial import Trial


class Mixed(Suite):
    def names(self):
        return ["good", "dies", "hangs", "raises", "last"]

    def trials(self, name):
        return [Trial("", {"dies": dying, "hangs": hanging, "raises": raising}.get(name, linear))]


def linear():
    model = torch.nn.Linear(3, 2)
    return wf.Job(
        "linear",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).square().mean(),
        data=[torch.randn(4, 3) for _ in range(3)],
        seed=0,
    )


def dying():
    ctypes.string_at(0)


def hanging():
    time.sleep(600)


def raising():
    job = linear()
    job.loss = lambda model, batch: model(batch).missing
    return job
