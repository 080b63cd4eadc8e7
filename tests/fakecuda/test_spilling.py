"""Spilling to page-locked memory, on a device whose copies and kernels are done late, and out of
step with each other."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waterflow as wf
from tests.support import fake_device
from tests.support.differences import assert_same_numbers
from tests.support.fake_cuda import FakeDriver
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS, OPTIMIZERS
from tests.support.tables import soaked, thinned
from tests.support.zoo_jobs import BERT, CNN, jobs_of
from waterflow.allocator_ext import _C
from waterflow.engine.engine import Engine

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

JOBS = {**MODELS, **OPTIMIZERS}
OUT_OF_MEMORY = 2


def make(name: str, steps: int = 9, **options: Any) -> wf.Job:
    if name in JOBS:
        job = JOBS[name]()
    else:
        (job,) = jobs_of(name, steps=steps)
        job.seed = 3
    for key, value in options.items():
        setattr(job, key, value)
    return job


@functools.cache
def eager(name: str) -> tuple[wf.Job, wf.JobReport]:
    job = make(name)
    return job, wf.run_eager(job, threads=1)


def peak(name: str) -> int:
    """Bytes that the job's captured steps need on the device, alone."""
    with Engine("256MiB", device=FakeCudaDevice(), threads=1) as engine:
        run = engine.submit(make(name, steps=3))._job
    return int(run.needs.memory.alone_bytes)


def trained(
    job: wf.Job, *others: wf.Job, memory: int | str, **options: Any
) -> tuple[wf.Report, Any, Any]:
    """Runs a job beside others; returns the report, the job's run and the log of the memory."""
    options = {"device": FakeCudaDevice(), "threads": 1, "check": True, **options}
    engine = Engine(memory, **options)
    with engine:
        runs = [engine.submit(one)._job for one in (job, *others)]
    log = engine._arena.take_log()
    return engine.report(), runs[0], log


def races(log: Any) -> list[str]:
    return [violation.message for violation in _C.check_happens_before(log, 2)]


def moved(run: Any) -> int:
    plans = [step.spill for step in run.steps.cache.steps() if step.spill is not None]
    return min((int(plan.moved_bytes) for plan in plans), default=0)


@pytest.mark.parametrize(
    ("name", "share"),
    [("lstm_deep", 0.8), ("adam_plain", 0.8), (CNN, 0.5)],
)
def test_numbers_are_equal_under_a_limit_however_late_the_copies(
    name: str, share: float, driver: FakeDriver
) -> None:
    limit = int(peak(name) * share)
    driver.delay(50, seed=len(name))
    job = make(name)
    report, run, log = trained(job, memory=limit, spill=True)
    assert_same_numbers(*eager(name), job, report.jobs[job.name])
    assert report.peak_bytes <= report.extent_bytes <= limit
    assert moved(run) > 0
    assert run.steps.spiller._store.moved > 0
    assert run.steps.spiller._store.capacity <= report.pinned_bytes
    assert races(log) == []


def test_what_is_away_between_steps_takes_no_memory_of_the_device(driver: FakeDriver) -> None:
    """Weights that are away lie in page-locked memory, where a callback finds their numbers."""
    limit = int(peak(CNN) * 0.45)
    seen: list[tuple[int, bool]] = []
    job = make(CNN)

    def look(result: wf.StepResult) -> None:
        parked = [p for p in job.model.parameters() if _C.is_parked(p.data)]
        seen.append((len(parked), all(bool(torch.isfinite(p).all()) for p in parked)))

    job.on_step = look
    driver.delay(100, seed=1)
    report, run, log = trained(job, memory=limit, spill=True)
    assert_same_numbers(*eager(CNN), job, report.jobs[job.name])
    assert run.steps.persistent.away
    assert seen[-1][0] > 0
    assert all(finite for _, finite in seen)
    assert not any(_C.is_parked(p.data) for p in job.model.parameters())
    assert races(log) == []


@pytest.mark.parametrize("policy", ["flow", soaked("waterwave")])
def test_other_jobs_beside_it_are_not_touched(policy: str, driver: FakeDriver) -> None:
    limit = int(peak(CNN) * 0.6)
    driver.delay(100, seed=2)
    job, other = make(CNN, memory_limit=limit), make(BERT)
    report, run, log = trained(job, other, memory="8MiB", policy=policy)
    assert_same_numbers(*eager(CNN), job, report.jobs[job.name])
    assert_same_numbers(*eager(BERT), other, report.jobs[other.name])
    assert report.jobs[job.name].peak_bytes <= limit
    assert moved(run) > 0
    assert races(log) == []


def test_a_limit_that_changes_while_the_job_runs(driver: FakeDriver) -> None:
    """Down, further down, and away."""
    need = peak(CNN)
    driver.delay(50, seed=3)
    job = make(CNN, steps=16)
    expected = make(CNN, steps=16)
    with Engine("8MiB", device=FakeCudaDevice(), threads=1, check=True) as engine:
        limits = {4: int(need * 0.6), 8: int(need * 0.45), 12: None}
        spilled: list[int] = []

        def change(result: wf.StepResult) -> None:
            if result.step in limits:
                handle.set_memory_limit(limits[result.step])
            spilled.append(len(engine._queue.jobs[0].steps.persistent.away))

        job.on_step = change
        engine.hold()
        handle = engine.submit(job)
        engine.release()
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, engine.report()[job.name])
    assert max(spilled[8:11]) > 0
    assert spilled[-1] == 0
    assert engine.check_races() == []


# The checker, and the tests, can fail


def without(log: Any, kind: _C.EventKind) -> Any:
    return np.ascontiguousarray(log[log["kind"] != int(kind)])


def test_the_checker_sees_a_wait_that_is_missing(driver: FakeDriver) -> None:
    _, _, log = trained(make(CNN), memory=int(peak(CNN) * 0.6), spill=True)
    assert races(log) == []
    assert any("may still copy" in text for text in races(without(log, _C.EventKind.JOIN)))
    assert any("does not wait" in text for text in races(without(log, _C.EventKind.MARK)))


def losses_without_waits(seed: int, ignores: bool) -> Any:
    program = f"""
        import torch; from tests.support import fake_cuda, fake_device
        import waterflow as wf
        from tests.fakecuda.test_spilling import CNN, make
        torch.set_num_threads(1)
        driver = fake_cuda.FakeDriver()
        driver.memory(2 << 30)
        driver.delay(600, seed={seed})
        driver.ignore_waits({ignores})
        job = make(CNN, steps=5, memory_limit={{limit}}, audit="off")
        report = wf.run([job], "8MiB", device=fake_device.FakeCudaDevice(), threads=1, lanes=1)
        print(report[job.name].losses)
    """
    program = textwrap.dedent(program).replace("{limit}", str(int(peak(CNN) * 0.6)))
    environment = {**os.environ, "PYTHONPATH": str(Path(fake_device.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    return ast.literal_eval(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.soak  # a test of the tests, not of the product
def test_without_waits_the_numbers_are_wrong(driver: FakeDriver) -> None:
    """On one lane, so that nothing but the copies has anything to wait for."""
    expected = eager(CNN)[1].losses[:5]
    assert losses_without_waits(5, ignores=False) == expected
    assert any(losses_without_waits(seed, ignores=True) != expected for seed in range(5, 8))


# What goes wrong


def test_page_locked_memory_that_cannot_be_had_ends_the_job(driver: FakeDriver) -> None:
    limit = int(peak(CNN) * 0.6)
    blocks = driver.calls("cuMemHostAlloc")
    one = make(CNN, steps=3, memory_limit=limit)
    wf.run([one], "8MiB", device=FakeCudaDevice(), threads=1)
    taken = driver.calls("cuMemHostAlloc") - blocks
    failed = []
    for nth in range(1, taken + 1):
        driver.fail("cuMemHostAlloc", nth, OUT_OF_MEMORY)
        one = make(CNN, steps=3, memory_limit=limit)
        report = wf.run([one], "8MiB", device=FakeCudaDevice(), threads=1)
        driver.reset()
        driver.memory(2 << 30)
        if not report.ok:
            failed.append(str(report[one.name].error))
        else:  # what could not be parked is where it was
            assert report[one.name].losses == eager(CNN)[1].losses[:3]
    assert any("cuMemHostAlloc" in text and "more memory" in text for text in failed)


@pytest.mark.parametrize(
    "symbol", thinned(["cuEventRecord", "cuStreamWaitEvent", "cuLaunchHostFunc"], keep=1)
)
def test_a_call_that_fails_in_a_spilled_step_is_named(symbol: str, driver: FakeDriver) -> None:
    limit = int(peak(CNN) * 0.6)
    before = driver.calls(symbol)
    run = functools.partial(wf.run, memory="8MiB", device="", threads=1)
    run([make(CNN, steps=6, memory_limit=limit)], device=FakeCudaDevice())
    count = driver.calls(symbol) - before
    for place in (0.5, 0.9):
        driver.fail(symbol, int(place * count), 1)
        messages: list[str] = []
        try:
            report = run([make(CNN, steps=6, memory_limit=limit)], device=FakeCudaDevice())
            messages = [str(job.error) for job in report if job.error]
        except (wf.WaterflowError, RuntimeError) as error:
            messages = [str(error)]
        driver.reset()
        driver.memory(2 << 30)
        assert not messages or any(symbol in message for message in messages), messages


def test_a_step_that_fails_leaves_nothing_behind(driver: FakeDriver) -> None:
    """Its values are away when an index of its batch is found to be out of range."""
    job, other = make(BERT, memory_limit=int(peak(BERT) * 0.6)), make(CNN)
    broken = list(job.data)
    bad = [tensor.clone() for tensor in broken[6]]
    bad[0].view(-1)[0] = 1 << 30
    broken[6] = type(broken[6])(bad) if type(broken[6]) in (list, tuple) else type(broken[6])(*bad)
    job.data = broken
    driver.delay(100, seed=4)
    engine = Engine("8MiB", device=FakeCudaDevice(), threads=1, check=True)
    with engine:
        engine.submit(job)
        engine.submit(other)
    report = engine.report()
    assert report[job.name].state == "failed"
    assert_same_numbers(*eager(CNN), other, report[other.name])
    assert engine.check_races() == []
    assert int(engine._arena.statistics().live) == 0


def test_a_file_is_no_tier_of_a_device(driver: FakeDriver) -> None:
    with pytest.raises(wf.JobError, match=r"spill='disk' on cuda:0.*page-locked.*spill=True"):
        wf.run([make(CNN)], "8MiB", device=FakeCudaDevice(), spill="disk")


def test_less_than_one_operator_works_on_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(wf.BudgetError, match=r"even by spilling.*takes \d+"):
        wf.run([make(CNN)], "20KiB", device=FakeCudaDevice(), spill=True)
