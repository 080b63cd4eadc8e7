"""The budget of a device's engine changes while jobs run: memory is unmapped, and mapped again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

import waterflow as wf
from tests.support.differences import assert_same_numbers
from tests.support.fake_cuda import FakeDriver, driver_with
from tests.support.fake_device import FakeCudaDevice
from tests.support.jobs import MODELS
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
PIECE = 64 * MIB


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with driver_with(1 << 30) as driver:
        yield driver


@contextlib.contextmanager
def training(*names: str, memory: str = "256MiB") -> Iterator[wf.Engine]:
    """Trains jobs of four epochs; inside, they are at work. Their numbers are the plain loop's."""
    jobs = [MODELS[name](epochs=4) for name in names]
    with wf.Engine(memory, device=FakeCudaDevice(), threads=1) as engine:
        handles = [engine.submit(job) for job in jobs]
        wait_until(lambda: all(len(handle.losses) >= 2 for handle in handles))
        yield engine
    for job in jobs:
        expected = MODELS[job.name](epochs=4)
        eager = wf.run_eager(expected, threads=1)
        assert_same_numbers(expected, eager, job, engine.report()[job.name])


def wait_for_memory(driver: FakeDriver, size: int) -> None:
    """Waits until the engines take so much: a profile of a step that is captured meanwhile lies
    beside the budget for a moment, or until it is collected."""

    def is_taken() -> bool:
        found = driver.live("memory_bytes")
        if found != size:
            gc.collect()
        return found == size

    wait_until(is_taken)


def test_it_shrinks_and_grows(driver: FakeDriver) -> None:
    others = driver.live("memory_bytes")  # of engines that tests before it have left
    driver.delay(100, seed=1)
    with training("cnn_shuffled", "encoder") as engine:
        for budget, taken in (("128MiB", 128 * MIB), ("40MiB", PIECE), ("320MiB", 320 * MIB)):
            engine.resize(budget)
            wait_for_memory(driver, others + taken)
    assert engine.budget == 320 * MIB
    assert driver.live("memory_bytes") == others


def test_a_budget_that_the_device_does_not_have_changes_nothing(driver: FakeDriver) -> None:
    others = driver.live("memory_bytes")
    with training("cnn", memory="128MiB") as engine:
        driver.memory(192 * MIB + others)
        with pytest.raises(wf.JobError, match="does not have so much"):
            engine.resize("512MiB")
        assert driver.live("memory_bytes") == others + 128 * MIB
        assert engine.budget == 128 * MIB


def test_what_does_not_fit_is_refused(driver: FakeDriver) -> None:
    with training("cnn", memory="128MiB") as engine:
        with pytest.raises(wf.BudgetError, match="'cnn' holds"):
            engine.resize("4KiB")
        assert engine.budget == 128 * MIB


def test_a_smaller_budget_is_kept_by_spilling(driver: FakeDriver) -> None:
    """What does not fit any more is planned into what is left, where the run may spill."""
    with pytest.raises(wf.BudgetError) as caught:
        wf.run([MODELS["cnn"]()], "1KiB", device=FakeCudaDevice(), threads=1)
    need = int(str(caught.value).split("needs ")[1].split()[0])
    job, device = MODELS["cnn"](epochs=3), FakeCudaDevice()
    with wf.Engine(2 * need, device=device, threads=1, spill=True) as engine:
        job.on_step = lambda result: engine.resize(int(need * 0.85)) if result.step == 4 else None
        run = engine.submit(job)._job
    expected = MODELS["cnn"](epochs=3)
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), job, engine.report()["cnn"])
    assert any(step.spill for step in run.steps.cache.steps())
