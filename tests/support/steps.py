"""A job's steps, prepared on the host without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import waterflow as wf
from tests.support.data import cross_entropy, rows
from tests.support.jobs import sgd
from tests.support.models import Mlp
from waterflow.account.purity import observer, undisturbed
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.rng import JobRng
from waterflow.job.training_step import eager_step
from waterflow.steps.job_steps import JobSteps
from waterflow.steps.prepared import Specialization


def job_of(model=Mlp, optimizer=sgd, loss=cross_entropy, data=None, **options):
    """A new job "a"; equal weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        net = model()
    return wf.Job(
        "a",
        model=net,
        optimizer=optimizer(net.parameters()),
        loss=loss,
        data=[rows(8)] if data is None else data,
        seed=5,
        **options,
    )


def steps_of(job, **options):
    """What an engine would hold of it."""
    return JobSteps(job, HostDevice(), JobRng(0), 1, **options)


def steady_steps(run):
    """The steps of a job run that make no state, as they are now."""
    return [step for step in run.steps.cache.steps() if not step.creates_state]


def first_batch(job):
    return next(iter(job.data))


def observed_step(job, batch=None):
    """Makes an eager step; returns what has seen it."""
    batch, seen = first_batch(job) if batch is None else batch, observer()
    with undisturbed(seen):
        eager_step(job, batch)
    return seen


class Assumed:
    """What a capture takes for granted, told by the test."""

    def __init__(self, changed=None):
        self.changed = changed

    def hold(self):
        return self.changed is None

    def difference(self):
        return self.changed

    def taken_anew(self):
        return Assumed()


def specialization(changed=None, constants=()):
    """One without a capture; `changed` is what it assumes and does not hold."""
    step = SimpleNamespace(graph=SimpleNamespace(constants=list(constants)))
    return Specialization(forward=None, assumptions=Assumed(changed), steady=step)
