"""Trainings of more than a loss and an optimizer equal loops that are written out, bit for bit."""

from __future__ import annotations

import struct

import pytest
import torch

import waterflow as wf
from tests.exactness.case import filler, one_thread
from tests.support.loops import SEED, TRAININGS, Training


@pytest.fixture(scope="module")
def references():
    """What each plain loop leaves, made once."""
    found = {}

    def of(name):
        if name not in found:
            with one_thread():
                training = TRAININGS[name]()
                losses, metrics = training.plain()
            found[name] = losses, metrics, training.tensors(), training.extra()
        return found[name]

    return of


def job_of(training: Training, **options) -> wf.Job:
    return wf.Job("case", seed=SEED, **training.job, **options)


def bits(numbers):
    return struct.pack(f"{len(numbers)}d", *numbers)


def check(training: Training, report: wf.JobReport, reference) -> None:
    losses, metrics, tensors, extra = reference
    assert report.state == "finished", report.error
    assert bits(report.losses) == bits(losses)
    assert report.metrics.keys() == metrics.keys()
    for name, values in metrics.items():
        assert bits(report.metrics[name]) == bits(values), name
    for name, tensor in training.tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    assert training.extra() == extra


@pytest.mark.parametrize("name", TRAININGS)
def test_the_reference_loop_is_the_users(name, references):
    training = TRAININGS[name]()
    check(training, wf.run_eager(job_of(training), threads=1), references(name))


@pytest.mark.parametrize("policy", ["flow", "temporal"])
@pytest.mark.parametrize("name", TRAININGS)
def test_beside_another_job(name, policy, references):
    training = TRAININGS[name]()
    how = {"capture": True} if training.captured else {}
    jobs = [job_of(training, **how), filler(30)]
    report = wf.run(jobs, memory="64MiB", policy=policy, lanes=2, threads=1)
    check(training, report["case"], references(name))
    assert report["case"].captured == ("captured" if training.captured else "opaque step")
    assert report["filler"].state == "finished"


@pytest.mark.parametrize("name", TRAININGS)
def test_alone(name, references):
    training = TRAININGS[name]()
    report = wf.run([job_of(training)], memory="64MiB", threads=1)
    check(training, report["case"], references(name))


@pytest.mark.parametrize("name", [name for name in TRAININGS if TRAININGS[name]().captured])
def test_captured_and_checked_at_every_step(name, references):
    training = TRAININGS[name]()
    job = job_of(training, capture=True, audit="all")
    report = wf.run([job], memory="64MiB", threads=1)
    check(training, report["case"], references(name))
    assert report["case"].checks == len(report["case"].losses)
