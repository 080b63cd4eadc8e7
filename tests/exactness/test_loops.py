"""Trainings of more than a loss and an optimizer equal loops that are written out, bit for bit."""

from __future__ import annotations

import struct
import threading

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
    if training.captured is not None:
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
    unchecked = "step" in training.job  # its first one makes what a graph finds
    assert report["case"].checks == len(report["case"].losses) - unchecked


#: Their steps keep all that they keep where checkpoints find it.
KEPT = [name for name in TRAININGS if name != "scaled"]


@pytest.mark.parametrize("name", KEPT)
def test_one_that_goes_on_has_never_stopped(name, references, tmp_path):
    def cut(result):
        if result.step == 6:
            raise RuntimeError("cut")

    first = job_of(TRAININGS[name](), on_step=cut)
    options = {"memory": "64MiB", "threads": 1}
    wf.run([first], checkpoint=tmp_path, checkpoint_every="4 steps", **options)
    training = TRAININGS[name]()
    report = wf.run([job_of(training)], resume=tmp_path, **options)
    assert report["case"].resumed_steps == 4
    check(training, report["case"], references(name))


@pytest.mark.parametrize("name", ["gan", "averaged", "accumulated"])
def test_one_that_rested_has_never_stopped(name, references):
    training, handles, rests = TRAININGS[name](), [], threading.Event()

    def rest(result):
        if result.step == 5:
            handles[0].suspend()
            rests.set()

    with wf.Engine(memory="64MiB", threads=1) as engine:
        engine.hold()  # else it may make its fifth step before there is a handle
        handles.append(engine.submit(job_of(training, on_step=rest)))
        other = engine.submit(filler(40))
        engine.release()
        assert rests.wait(300)
        assert handles[0].suspend(timeout=300)
        assert other.result(300).state == "finished"
        assert len(handles[0].losses) == 5
        handles[0].resume()
        check(training, handles[0].result(300), references(name))
